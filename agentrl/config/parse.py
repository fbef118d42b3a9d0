"""Flags and the keys of configuration files to typed values, each with the place it came from.

Nothing is decided here about what values mean together; see :mod:`agentrl.config.validate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.config import passthrough
from agentrl.config.fields import Option, options
from agentrl.config.foreign import ForeignField, megatron_fields
from agentrl.config.names import RENAMED, implied, unknown_message
from agentrl.config.values import EXPECTED, PARSERS, coerce, parse_bool, parse_json_or_text, parse_key_value
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


def _flag_table(config_class: type) -> dict[str, Option]:
    table = {option.flag[2:]: option for option in options(config_class).values() if option.kind != "passthrough"}
    for alias, name in ALIASES.get(config_class.__name__, {}).items():
        table[alias] = options(config_class)[name]
    return table


def parse_flags(config_class: type, argv: Sequence[str]) -> tuple[Given, str | None]:
    """Read the command line.

    Returns:
        What was given and the path behind ``--config``, if any. Unknown flags (with the nearest right one), missing
        values and values of the wrong type are its ``problems``.
    """
    table = _flag_table(config_class)
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
        behind = _words_behind(argv, position + 1)
        words = [inline] if sep else behind
        try:
            if name == "config":
                config_file, used = _take(f"--{name}", "a file", words, 1)[0], 1
            else:
                used = _put(config_class, given, name, words, bool(sep), table)
        except ConfigError as error:
            given.problems.append(str(error))
            used = len(behind)
        position += 1 + (0 if sep else used)
    return given, config_file


def _put(config_class: type, given: Given, name: str, words: list[str], inline: bool, table: dict) -> int:
    """Read the flag ``--name``; returns the number of words used. Raises ConfigError."""
    if name in table:
        return _put_own(given, table[name], f"--{name}", words, inline)
    if name.startswith("no-") and name[3:] in table and table[name[3:]].kind == "bool":
        if inline:
            raise ConfigError(f"--{name} takes no value, got {words[0]!r}")
        given.put(table[name[3:]].name, False, f"--{name}")
        return 0
    reason = implied(name, words) if "megatron" in options(config_class) else None
    if reason is not None:
        given.notes.append(f"--{name} has no effect: {reason}.")
        return len(words)
    return _put_foreign(config_class, given, name, words, inline, table)


def _words_behind(argv: Sequence[str], start: int) -> list[str]:
    end = start
    while end < len(argv) and not argv[end].startswith("--"):
        end += 1
    return list(argv[start:end])


def _take(flag: str, expected: str, words: Sequence[str], count: int) -> list[str]:
    if len(words) < count:
        raise ConfigError(f"{flag}: expected {expected}, got nothing")
    return list(words[:count])


def _put_own(given: Given, option: Option, flag: str, words: list[str], inline: bool) -> int:
    """Read one flag of ours; returns the number of words used."""
    if option.kind == "bool":
        if inline:
            given.put(option.name, _read(option, flag, words[0]), flag)
            return 1
        following = words[0].lower() if words else ""
        if following in ("true", "false"):
            given.put(option.name, parse_bool(following), flag)
            return 1
        given.put(option.name, True, flag)
        return 0
    if option.kind == "pairs":
        _take(flag, "NAME PATH", words, 2)
        pairs = tuple(zip(words[::2], words[1::2], strict=False))
        given.put(option.name, pairs, flag)
        return 2 * len(pairs)
    if option.kind == "list":
        texts = words if len(words) > 1 else _take(flag, _expected(option), words, 1)
        given.put(option.name, tuple(texts), flag)
        return len(texts)
    (word,) = _take(flag, _expected(option), words, 1)
    if option.kind == "mapping":
        key, value = parse_key_value(word, flag)
        given.put(option.name, {key: value}, flag)
    else:
        given.put(option.name, _read(option, flag, word), flag)
    return 1


def _expected(option: Option) -> str:
    if option.kind == "choice":
        return "one of " + ", ".join(option.choices)
    return EXPECTED.get(option.kind, option.metavar)


def _read(option: Option, flag: str, word: str) -> Any:
    if option.nullable and word.lower() == "none":
        return None
    if option.kind == "choice":
        return _choice(option, flag, word)
    try:
        return PARSERS[option.kind](word)
    except ValueError:
        raise ConfigError(f"{flag}: expected {_expected(option)}, got {word!r}") from None


def _choice(option: Option, given: str, value: Any) -> Any:
    if value not in option.choices:
        extra = ""
        if option.name == "advantage_estimator" and value in ("gspo", "ppo", "reinforce_plus_plus", "rloo", "cispo"):
            extra = f" ({value} is not available yet in this version)"
        elif option.name == "kl_loss_type" and value == "k1":
            extra = " (as a loss, k1 has an expected gradient of 0: it adds noise and holds nothing back)"
        raise ConfigError(f"{given}: expected {_expected(option)}, got {value!r}{extra}")
    return value


def _put_foreign(config_class: type, given: Given, name: str, words: list[str], inline: bool, table: dict) -> int:
    """Read a flag handed on to SGLang or Megatron; returns the number of words used."""
    fields, flag = options(config_class), f"--{name}"
    if name.startswith("sglang-") and "sglang" in fields and name not in RENAMED:
        found = passthrough.sglang_field(flag, name[len("sglang-") :])
        key = found.name if found else name[len("sglang-") :].replace("-", "_")
        value, used = _foreign_value(flag, found, words, inline)
        given.put("sglang", {key: value}, flag)
        return used
    if "megatron" in fields:
        off = name.startswith("no-")
        found = passthrough.megatron_field(flag, name[3:] if off else name)
        if found is not None and (not off or found.kind == "bool"):
            value, used = (False, 0) if off else _foreign_value(flag, found, words, inline)
            given.put("megatron", {found.name: value}, flag)
            return used
    raise ConfigError(_unknown(config_class, flag, name, table))


def _unknown(config_class: type, flag: str, name: str, table: dict) -> str:
    own = [*table, *("no-" + n for n, option in table.items() if option.kind == "bool"), "config"]
    message = unknown_message(flag, name, own, as_flag=True)
    if "Did you mean" in message or "lists all" not in message or "megatron" not in options(config_class):
        return message
    known = megatron_fields()
    if known is None:
        from agentrl.versions import install_command

        return f"{message} Megatron's own flags are taken when megatron-core is installed: {install_command('train')}."
    return unknown_message(flag, name, [n.replace("_", "-") for n in known], as_flag=True)


def _foreign_value(flag: str, found: ForeignField | None, words: list[str], inline: bool) -> tuple[Any, int]:
    if found is None:  # the package is not installed: take what is there, it will check
        if not words:
            return True, 0
        if len(words) == 1:
            return parse_json_or_text(words[0]), 1
        return [parse_json_or_text(word) for word in words], len(words)
    if found.kind == "bool" and not inline:
        if words and words[0].lower() in ("true", "false"):
            return parse_bool(words[0]), 1
        return True, 0
    if not words:
        raise ConfigError(f"{flag}: expected {EXPECTED.get(found.kind, 'a value')}, got nothing")
    taken = words if found.kind == "list" else words[:1]
    return passthrough.read_text(flag, found, taken), len(taken)


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
    fields, name = options(config_class), key.replace("-", "_")
    name = ALIASES.get(config_class.__name__, {}).get(name, name)
    if name in fields:
        _put_typed(given, fields[name], source, value)
    elif name.startswith("sglang_") and "sglang" in fields:
        _put_typed(given, fields["sglang"], source, {name[len("sglang_") :]: value})
    elif "megatron" in fields and (reason := implied(name.replace("_", "-"), [str(value)])) is not None:
        given.notes.append(f"{source} has no effect: {reason}.")
    elif "megatron" in fields and passthrough.megatron_field(source, name) is not None:
        _put_typed(given, fields["megatron"], source, {name: value})
    else:
        known = [n.replace("_", "-") for n in fields]
        raise ConfigError(unknown_message(source, name.replace("_", "-"), known, as_flag=False))


def _put_typed(given: Given, option: Option, source: str, value: Any) -> None:
    if value is None:
        if not option.nullable:
            raise ConfigError(f"{source}: expected {_expected(option)}, got nothing")
        given.put(option.name, None, source)
    elif option.kind == "choice":
        given.put(option.name, _choice(option, source, value), source)
    elif option.kind == "pairs":
        given.put(option.name, _pairs(source, value), source)
    elif option.kind == "list":
        given.put(option.name, _list(source, value), source)
    elif option.kind in ("mapping", "passthrough"):
        if not isinstance(value, dict):
            raise ConfigError(f"{source}: expected a table of names and values, got {value!r}")
        given.put(option.name, {str(k): v for k, v in _foreign_table(option.name, source, value)}, source)
    else:
        try:
            given.put(option.name, coerce(option.kind, value), source)
        except ValueError:
            raise ConfigError(f"{source}: expected {_expected(option)}, got {value!r}") from None


def _foreign_table(name: str, source: str, table: dict) -> list[tuple[str, Any]]:
    if name not in ("sglang", "megatron"):
        return list(table.items())
    items = []
    for key, value in table.items():
        given = f"{source}.{key}"
        if name == "sglang":
            found = passthrough.sglang_field(given, str(key))
        else:
            found = passthrough.megatron_field(given, str(key))
            if found is None and megatron_fields() is not None:
                known = [n.replace("_", "-") for n in megatron_fields()]
                raise ConfigError(unknown_message(given, str(key).replace("_", "-"), known, as_flag=False))
        items.append(
            (
                found.name if found else str(key).replace("-", "_"),
                passthrough.read_typed(given, found, value) if found else value,
            )
        )
    return items


def _list(source: str, value: Any) -> tuple[str, ...]:
    """Texts; one alone may stand without a list, and no text is none."""
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, (list, tuple)) or not all(isinstance(item, str) for item in items):
        raise ConfigError(f"{source}: expected a list of text, got {value!r}")
    return tuple(item for item in items if item)


def _pairs(source: str, value: Any) -> tuple[tuple[str, str], ...]:
    pairs = list(value.items()) if isinstance(value, dict) else value
    ok = isinstance(pairs, (list, tuple)) and all(
        isinstance(p, (list, tuple)) and len(p) == 2 and all(isinstance(x, str) for x in p) for p in pairs
    )
    if not ok:
        raise ConfigError(f"{source}: expected pairs of name and path, got {value!r}")
    return tuple((name, path) for name, path in pairs)
