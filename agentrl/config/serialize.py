"""Configurations as JSON-ready mappings, and back."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, TypeVar

from agentrl.config.options import options
from agentrl.config.parse import parse_mapping
from agentrl.config.presets import DEMO, demo_folder, model_folder
from agentrl.errors import CheckpointError, DataError
from agentrl.jsonl import read_json

T = TypeVar("T")
OWNER = "run"
"""File in a folder of checkpoints outside the run's own: the path of the run that saves there."""
GONE = ("host",)
"""Options of stored runs that there are no more, and that mean nothing now."""


def to_dict(config: object) -> dict[str, Any]:
    """All options of ``config``; the embedded model's folder is written as its name, so that a run can move."""
    values = {}
    kind: type = type(config)
    for name in options(kind):
        value = copy.deepcopy(getattr(config, name))
        if isinstance(value, tuple):
            value = [item if isinstance(item, str) else list(item) for item in value]
        if name in ("hf_checkpoint", "ref_load") and value == str(demo_folder()):
            value = DEMO
        values[name] = value
    return values


def from_dict(config_class: type[T], values: dict[str, Any]) -> T:
    """Inverse of :func:`to_dict`; options that are absent keep their defaults.
    Raises ConfigError: unknown key or value of the wrong type."""
    given = parse_mapping(config_class, _of_today(values), config_class.__name__).readable().values
    for name in ("hf_checkpoint", "ref_load"):
        if given.get(name) is not None:
            given[name] = model_folder(given[name])
    return config_class(**given)


def run_folder_of(path: str | Path) -> Path | None:
    """The run folder ``path`` is, or lies in (a checkpoint), or that saves there; None without a ``config.json``."""
    start = Path(path).expanduser()
    for folder in (start, *start.absolute().parents[:2]):
        for run in (folder, owner_of(folder)):
            if run and (run / "config.json").is_file():
                with (run / "config.json").open(encoding="utf-8", errors="replace") as stream:
                    if "rollout_batch_size" in stream.read(1 << 16):
                        return run
    return None


def owner_of(folder: Path) -> Path | None:
    """The run that saves into a folder outside its own (``--save``), as it noted there; None when none did."""
    try:
        noted = (folder / OWNER).read_text(encoding="utf-8", errors="replace").strip()
        return Path(noted) if noted and Path(noted).is_dir() else None
    except (OSError, ValueError):
        return None


def read_run_config(folder: Path) -> dict[str, Any]:
    """The options in a run folder's ``config.json``. Raises CheckpointError when it is torn."""
    try:
        return _of_today(read_json(folder / "config.json"))
    except DataError as error:
        advice = "restore it from a copy, or give the options again without --load"
        raise CheckpointError(f"{error}; {advice}") from None


def _of_today(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in GONE}
