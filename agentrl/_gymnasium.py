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
from collections.abc import Sequence
from types import ModuleType

BUILT_IN = {"search": "agentrl.envs.search:SearchEnv"}
"""Built-in environments: name to entry point, imported when first made."""


def register_ids() -> None:
    """Registers the built-in environments with Gymnasium. Imports none of our modules: they import Gymnasium."""
    gymnasium = importlib.import_module("gymnasium")
    for name, entry_point in BUILT_IN.items():
        gymnasium.register(id=f"agentrl/{name}-v0", entry_point=entry_point)


class _WhenImported(importlib.abc.MetaPathFinder):
    """Lets the usual finders load Gymnasium, then registers our ids; serves once."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "gymnasium":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def load_then_register(module: ModuleType) -> None:
            load(module)
            register_ids()

        spec.loader.exec_module = load_then_register  # type: ignore[method-assign]
        return spec


def install() -> None:
    """Registers our ids now if Gymnasium is imported, otherwise when it is."""
    if "gymnasium" in sys.modules:
        register_ids()
    else:
        sys.meta_path.insert(0, _WhenImported())
