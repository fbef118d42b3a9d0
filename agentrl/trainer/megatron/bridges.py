"""mbridge's bridge of one architecture.

mbridge imports all of its bridges, some of which import half of transformers: seconds, for a trainer that needs one. So
its package of bridges is given to Python without its own ``__init__``, and the module that registers the model's type
is imported when asked for.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mbridge.core.bridge import Bridge

_PACKAGE = "mbridge.models"


def leave_out_others() -> None:
    """Call it before mbridge is imported."""
    spec = importlib.util.find_spec("mbridge")
    if spec is None or not spec.submodule_search_locations or _PACKAGE in sys.modules:
        return
    package = types.ModuleType(_PACKAGE)
    package.__path__ = [str(Path(spec.submodule_search_locations[0]) / "models")]
    sys.modules[_PACKAGE] = package


def bridge_class(model_type: str) -> type[Bridge]:
    """The bridge that is registered for ``model_type``. Raises KeyError where there is none."""
    from mbridge.core.bridge import _MODEL_REGISTRY

    if model_type not in _MODEL_REGISTRY:
        folder = Path(sys.modules[_PACKAGE].__path__[0])
        for file in sorted(folder.rglob("*.py")):
            if f'@register_model("{model_type}")' in file.read_text(encoding="utf-8"):
                names = file.relative_to(folder).with_suffix("").parts
                importlib.import_module(".".join((_PACKAGE, *(name for name in names if name != "__init__"))))
    return _MODEL_REGISTRY[model_type]
