"""Flags and the keys of configuration files to typed values, each with the place it came from.

Nothing is decided here about what values mean together; see :mod:`agentrl.config.validate`.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

from agentrl.config.foreign import megatron_fields, sglang_field
from agentrl.config.megatron_options import megatron_field
from agentrl.config.names import IMPLIED, RENAMED, unknown_message
from agentrl.config.options import Option, json_or_text, options
from agentrl.errors import ConfigError

ALIASES = {
    "EvalConfig": {
        "limit": "eval_tasks",
        "concurrency": "rollout_concurrency",
        "temperature": "eval_temperature",
        "top-p": "eval_top_p",
        "top-k": "eval_top_k",
        "max-tokens": "rollout_max_response_len",
    }
}
"""Second names of flags, per configuration class."""


@dataclass
class Given:
    """What one place gave: values by field name, and how each was written there (for messages)."""

    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    """What could not be read, a line each; the rest was read all the same."""
    notes: list[str] = field(default_factory=list)
    """What was accepted and has no effect, with the reason."""

    def put(self, name: str, value: Any, source: str) -> None:
        """Set ``name``; mappings are merged key by key, repeated pairs are collected."""
        if isinstance(value, dict):
            value = {**self.values.get(name, {}), **value}
        elif isinstance(value, tuple):
            value = self.values.get(name, ()) + value
        self.values[name] = value
        self.sources[name] = source

    def readable(self) -> Given:
        """Itself. Raises ConfigError with all problems where there are any."""
        if self.problems:
            raise ConfigError("\n".join(self.problems))
        return self


def _read(option: Option, source: str, value: Any, *, text: bool = False) -> Any:
    """``value`` as ``option`` holds it. Raises ConfigError naming ``source``, where it was given."""
    try:
        return option.read(value, text=text)
    except (ValueError, TypeError):
        got = "nothing" if value is None else repr(value)
        raise ConfigError(f"{source}: expected {option.expected}, got {got}") from None


# -- flags ---------------------------------------------------------------------------------------------------


def parse_flags(config_class: type, argv: Sequence[str]) -> tuple[Given, str | None]:
    """Read the command line: what was given, and the path behind ``--config``, if any. Unknown flags (with the nearest
    right one), missing values and values of the wrong type are its ``problems``."""
    given, config_file, position = Given(), None, 0
    while position < len(argv):
        word = argv[position]
        if not word.startswith("--") or word == "--":
            given.problems.append(
                f"Unexpected argument {word!r}: options begin with `--`. Quote values that hold spaces."
            )
            position += 1
            continue
        name, sep, inline = word[2:].partition("=")
        behind = list(takewhile(lambda word: not word.startswith("--"), argv[position + 1 :]))
        try:
            words = [inline] if sep else behind
            if name == "config":
                config_file, used = _value(Option("config", "str", is_path=True), "--config", words, bool(sep))
            else:
                used = _put_flag(config_class, given, name, words, bool(sep))
        except ConfigError as error:
            given.problems.append(str(error))
            used = len(behind)
        position += 1 + (0 if sep else used)
    return given, config_file


def _put_flag(config_class: type, given: Given, name: str, words: list[str], inline: bool) -> int:
    """Read the flag ``--name``; returns the number of words used. Raises ConfigError."""
    flag, used = f"--{name}", 0
    value: Any = False
    if _needless(config_class, given, name, flag):
        return len(words)
    if (found := _find(config_class, name, flag, as_flag=True)) is not None:
        value, used = _value(found[1], flag, words, inline)
    else:
        found = _find(config_class, name[3:], flag, as_flag=True) if name.startswith("no-") else None
        if found is None or found[1].kind != "bool" or found[0] == "sglang":
            raise ConfigError(_unknown(config_class, name, flag, as_flag=True))
        if inline:
            raise ConfigError(f"{flag} takes no value, got {words[0]!r}")
    field, option = found
    if field != option.name:
        value = {option.name: value}
    given.put(field, tuple(value) if isinstance(value, list) else value, flag)
    return used


def _needless(config_class: type, given: Given, name: str, source: str) -> bool:
    """Whether an option asks for what is so anyway; that is noted, and nothing is set."""
    if name not in IMPLIED or "megatron" not in options(config_class):
        return False
    given.notes.append(f"{source} has no effect: {IMPLIED[name]}.")
    return True


def _names(config_class: type, as_flag: bool) -> dict[str, Option]:
    """Names of our own options, with dashes, as flags or as keys of a file."""
    fields = options(config_class)
    table = {
        option.flag[2:] if as_flag else name.replace("_", "-"): option
        for name, option in fields.items()
        if not (as_flag and option.kind == "passthrough")
    }
    return table | {alias: fields[name] for alias, name in ALIASES.get(config_class.__name__, {}).items()}


def _find(config_class: type, name: str, source: str, *, as_flag: bool) -> tuple[str, Option] | None:
    """The field that ``name`` (with dashes) sets, and the option that reads its value: of another package, one key of
    the field ``sglang`` or ``megatron``. None: there is no such option. Raises ConfigError: it cannot be set."""
    if (own := _names(config_class, as_flag).get(name)) is not None:
        return own.name, own
    if name.startswith("sglang-") and "sglang" in options(config_class) and name not in RENAMED:
        return "sglang", sglang_field(source, name.removeprefix("sglang-"))
    found = megatron_field(source, name) if "megatron" in options(config_class) else None
    return ("megatron", found) if found is not None else None


def _unknown(config_class: type, name: str, source: str, *, as_flag: bool) -> str:
    ours = _names(config_class, as_flag)
    switches = [f"no-{n}" for n, option in ours.items() if option.kind == "bool"] if as_flag else []
    message = unknown_message(source, name, [*ours, *switches, "config"], as_flag=as_flag)
    if "megatron" not in options(config_class) or "lists all" not in message:
        return message
    if (known := megatron_fields()) is not None:  # nothing of ours is like it
        return unknown_message(source, name, [n.replace("_", "-") for n in known], as_flag=as_flag)
    from agentrl.versions import install_command

    return f"{message} Megatron's own flags are taken when megatron-core is installed: {install_command('train')}."


def _value(option: Option, flag: str, words: list[str], inline: bool) -> tuple[Any, int]:
    """The value of a flag from the words behind it, and how many of them it took. Raises ConfigError."""
    if option.kind == "any" and len(words) != 1:
        return [json_or_text(word) for word in words] or True, len(words)
    if option.kind == "bool" and not inline and (not words or words[0].lower() not in ("true", "false")):
        return True, 0
    if len(words) < (2 if option.kind == "pairs" else 1):
        raise ConfigError(f"{flag}: expected {'NAME PATH' if option.kind == 'pairs' else option.expected}, got nothing")
    if option.kind == "pairs":
        return tuple(zip(words[::2], words[1::2], strict=False)), len(words) // 2 * 2
    if option.kind == "list":
        if not option.group and len(words) == 1 and words[0].lstrip().startswith("["):  # as SGLang takes lists
            return _read(option, flag, json_or_text(words[0])), 1
        return _read(option, flag, words, text=True), len(words)
    if option.kind == "mapping":
        key, sep, value = words[0].partition("=")
        if not sep or not key.strip():
            raise ConfigError(f"{flag}: expected KEY=VALUE, got {words[0]!r}")
        return {key.strip(): json_or_text(value)}, 1
    return _read(option, flag, words[0], text=True), 1


# -- files ---------------------------------------------------------------------------------------------------


def parse_mapping(config_class: type, values: dict[str, Any], where: str) -> Given:
    """Read the keys of a file (``where`` names it), as :func:`parse_flags` reads flags."""
    given = Given()
    for key, value in values.items():
        try:
            _put_key(config_class, given, str(key), f"{where}: {key}", value)
        except ConfigError as error:
            given.problems.append(str(error))
    return given


def _put_key(config_class: type, given: Given, key: str, source: str, value: Any) -> None:
    """Read one key of a file. Raises ConfigError."""
    name = key.replace("_", "-")
    if _needless(config_class, given, name, source):
        return
    if (found := _find(config_class, name, source, as_flag=False)) is None:
        raise ConfigError(_unknown(config_class, name, source, as_flag=False))
    field, option = found
    if option.kind == "list" and field == option.name:  # one alone may stand without a list, and no text is none
        items = _read(option, source, [value] if isinstance(value, str) else value)
        value = tuple(item for item in items if item)
    else:
        value = _read(option, source, value)
    if field != option.name:
        value = {option.name: value}
    elif option.kind == "passthrough":
        value = dict(_foreign_item(field, f"{source}.{key}", key, item) for key, item in value.items())
    given.put(field, value, source)


def _foreign_item(package: str, source: str, key: str, value: Any) -> tuple[str, Any]:
    """One key of the table [sglang] or [megatron]. Raises ConfigError."""
    found = sglang_field(source, key) if package == "sglang" else megatron_field(source, key)
    if found is None and (known := megatron_fields()) is not None:
        names = [n.replace("_", "-") for n in known]
        raise ConfigError(unknown_message(source, key.replace("_", "-"), names, as_flag=False))
    found = found or Option(key.replace("-", "_"), "any")
    return found.name, _read(found, source, value)


def read_file(path: str) -> dict[str, Any]:
    """The mapping in a TOML, YAML or JSON file. Raises ConfigError naming the file and the line."""
    readers: dict[str, Callable[[str], Any]] = {"toml": tomllib.loads, "yaml": _yaml, "yml": _yaml, "json": json.loads}
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: cannot be read: {error}") from None
    form = Path(path).suffix[1:].lower()
    if form not in readers:
        raise ConfigError(f"--config {path}: expected a .toml, .yaml or .json file")
    try:
        values = readers[form](text)
    except ValueError as error:
        form = form.upper().replace("YML", "YAML")
        raise ConfigError(f"--config {path}: not valid {form}: {' '.join(str(error).split())}") from None
    if values is not None and not isinstance(values, dict):
        raise ConfigError(f"--config {path}: expected keys and values, got {type(values).__name__}")
    return values or {}


def _yaml(text: str) -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        """YAML 1.1 reads `1e-6` as text; the core schema of YAML 1.2, and everybody, reads a number."""

    number = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789"))
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ValueError(error) from None
