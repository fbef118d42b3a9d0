"""Makes ``gymnasium.make("agentrl/...")`` work after ``import agentrl``, without importing Gymnasium.

Gymnasium has no plugin entry points, and importing it costs more than the command line's help may.
So our ids are registered the moment somebody imports Gymnasium, before or after us.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

BUILT_IN = {
    "search": "agentrl.envs.builtin.search:SearchEnv",
    "multi_agent": "agentrl.envs.builtin.hint_game:HintGameEnv",
    "textgame": "agentrl.envs.builtin.textgame:TextGameEnv",
    "service": "agentrl.envs.builtin.service:ServiceEnv",
    "calculator": "agentrl.envs.builtin.calculator:CalculatorEnv",
    "guess": "agentrl.envs.builtin.guess:GuessEnv",
    "python": "agentrl.envs.builtin.python:PythonEnv",
}
"""Built-in environments: name to entry point, imported when first made."""


def register_ids() -> None:
    """Registers the built-in environments with Gymnasium. Imports none of our modules: they import Gymnasium."""
    gymnasium = importlib.import_module("gymnasium")
    for name, entry_point in BUILT_IN.items():
        gymnasium.register(id=f"agentrl/{name}-v0", entry_point=entry_point)


class _WhenImported(importlib.abc.MetaPathFinder):
    """Lets the usual finders find Gymnasium, and registers our ids once it is loaded."""

    _looking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "gymnasium" or self._looking:
            return None
        self._looking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._looking = False
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = self._then_register(spec.loader.exec_module)  # type: ignore[assignment,method-assign]
        return spec

    def _then_register(self, load: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
        def load_and_register(module: ModuleType) -> None:
            load(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                register_ids()

        return load_and_register


def install() -> None:
    """Registers our ids now if Gymnasium is imported, otherwise when it is."""
    if "gymnasium" in sys.modules:
        register_ids()
    else:
        sys.meta_path.insert(0, _WhenImported())
