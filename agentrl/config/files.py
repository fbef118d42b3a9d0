"""Configuration files: TOML, YAML or JSON into a plain mapping."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError


def read_file(path: str) -> dict[str, Any]:
    """The mapping in a TOML, YAML or JSON file. Raises ConfigError naming the file and the line."""
    file = Path(path).expanduser()
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: cannot be read: {error}") from None
    values = _loader(file.suffix, path)(text, path)
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"--config {path}: expected keys and values, got {type(values).__name__}")
    return values


def _loader(suffix: str, path: str) -> Callable[[str, str], Any]:
    loaders = {".toml": _toml, ".yaml": _yaml, ".yml": _yaml, ".json": _json}
    if suffix.lower() not in loaders:
        raise ConfigError(f"--config {path}: expected a .toml, .yaml or .json file")
    return loaders[suffix.lower()]


def _toml(text: str, path: str) -> Any:
    import tomllib

    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"--config {path}: not valid TOML: {error}") from None


def _yaml(text: str, path: str) -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        """YAML 1.1 reads `1e-6` as text; the core schema of YAML 1.2, and everybody, reads a number."""

    Loader.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
    )
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path}: not valid YAML: {' '.join(str(error).split())}") from None


def _json(text: str, path: str) -> Any:
    import json

    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--config {path}: not valid JSON: {error}") from None
