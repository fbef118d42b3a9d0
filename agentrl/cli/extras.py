"""Packages that come with an extra, and what to say when they are not there."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from agentrl.errors import ConfigError
from agentrl.versions import install_command

TRAINING = (
    "torch",
    "megatron.core",
    "ray",
    "sglang",
    "sglang_router",
    "transformers",
    "aiohttp",
    "orjson",
    "pyarrow",
    "tensorboard",
    "matplotlib",
)
"""What ``agentrl train`` imports, in this process or in one it starts."""

ENGINES = ("torch", "sglang", "sglang_router", "transformers", "aiohttp", "orjson", "pyarrow")
"""What ``agentrl eval`` imports to serve a model."""

_EXTRA_OF = {
    "train": (*TRAINING, "megatron", "tokenizers", "safetensors", "uvloop"),
    "retriever": ("starlette", "uvicorn"),
}
"""Extra -> modules that come with it."""

_ENGINE_HINT = f"{install_command('gpu')} on a machine with GPUs, `make venv` in a clone on one without"


def require(command: str, modules: Sequence[str]) -> None:
    """Check, without importing, that ``modules`` are installed, before a command makes or starts anything.
    Raises ConfigError: some are not; the text names them and the way to get them."""
    missing = [name for name in modules if not _installed(name)]
    if not missing:
        return
    hint = _ENGINE_HINT if "sglang" in missing else install_command("train")
    raise ConfigError(
        f"agentrl {command} needs packages that are not installed: {', '.join(missing)}. Get them: {hint}."
    )


def _installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # the parent of a dotted name is absent
        return False


def hint_for(error: ModuleNotFoundError) -> str | None:
    """The line for a package that an extra would have brought; None when the module is nothing we know."""
    top = (error.name or "").partition(".")[0]
    for extra, modules in _EXTRA_OF.items():
        if top in modules:
            how = _ENGINE_HINT if top == "sglang" else install_command(extra)
            return f"{top} is not installed, and this command needs it: {how}"
    return None
