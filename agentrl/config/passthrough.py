"""Options that are not ours: ``--sglang-*`` for the server, Megatron's own names for the trainer.

Both are checked by name and type where the package is installed; what the run itself decides is refused with
the flag that decides it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentrl.config.foreign import ForeignField, megatron_fields, sglang_fields
from agentrl.config.megatron_options import OWNED
from agentrl.config.names import nearest
from agentrl.config.values import EXPECTED, PARSERS, coerce, parse_json_or_text
from agentrl.errors import ConfigError

_BY_RUN = "it is chosen by the run"
SGLANG_OWNED = {
    "model_path": "use --hf-checkpoint",
    "model": "use --hf-checkpoint",
    "tokenizer_path": "use --hf-checkpoint",
    "host": "use --host",
    "dtype": "use --dtype",
    "random_seed": "use --seed",
    "enable_deterministic_inference": "use --deterministic",
    "tp_size": "use --rollout-num-gpus-per-engine",
    "nnodes": _BY_RUN,
    "node_rank": _BY_RUN,
    "dist_init_addr": _BY_RUN,
    "base_gpu_id": _BY_RUN,
    "port": "every server of a run takes a free port",
    "nccl_port": "every server of a run takes a free port",
    "device": _BY_RUN,
    "api_key": "a random key is made for each run",
    "admin_api_key": "a random key is made for each run",
    "weight_version": "weight versions are counted by the run",
    "config": "write the keys into the table [sglang] of --config FILE",
}
"""Server arguments that the run itself sets, with what to do in their place."""

SGLANG_CODE = {
    "trust_remote_code": "code of the model folder is run",
    "custom_weight_loader": "a module that it names is imported",
    "forward_hooks": "modules that it names are imported",
    "sidecar": "a module that it names is run",
    "unified_cache_external_linker_backend": "a module that it names is imported",
    "unified_cache_external_linker_config": "a module that it names is imported",
    "hicache_storage_backend_extra_config": "a module that it names is imported",
    "enable_custom_logit_processor": "code that clients send is unpickled and run",
    "trust_request_chat_template": "templates that clients send are rendered",
    "tool_server": "tools run on this machine for whoever sends requests",
}
"""Server arguments by which code of others is run, and how."""


def remote_code(sglang: Mapping[str, Any], allowed: bool) -> Iterator[str]:
    """A problem for each argument of the server that runs code of others, unless that is ``allowed``."""
    for name, value in sglang.items():
        how = SGLANG_CODE.get(name.replace("-", "_"))
        if how is not None and value not in (False, None) and not allowed:
            flag = f"--sglang-{name.replace('_', '-')}"
            yield f"{flag}: {how}. Give --allow-remote-code too if you trust where it comes from."


def read_text(given: str, field: ForeignField, words: Sequence[str]) -> Any:
    """The value of flag ``given`` from the words behind it. Raises ConfigError."""
    if field.kind == "list":
        if len(words) == 1 and words[0].lstrip().startswith("["):
            value = _json(given, words[0])
            return read_typed(given, field, value)
        return [_scalar(given, field.element, word) for word in words]
    (word,) = words
    if field.nullable and word.lower() in ("none", "null"):
        return None
    if field.kind == "json":
        return parse_json_or_text(word)
    return _checked_choice(given, field, _scalar(given, field.kind, word))


_SUFFIX = {"k": 10**3, "M": 10**6, "Ki": 2**10, "Mi": 2**20}


def _scalar(given: str, kind: str, word: str) -> Any:
    if kind == "int":
        word = re.sub(r"^(\d+)(k|M|Ki|Mi)$", lambda m: str(int(m[1]) * _SUFFIX[m[2]]), word)
    try:
        return PARSERS[kind](word)
    except ValueError:
        raise ConfigError(f"{given}: expected {EXPECTED[kind]}, got {word!r}") from None


def _json(given: str, word: str) -> Any:
    try:
        return json.loads(word)
    except ValueError as error:
        raise ConfigError(f"{given}: not valid JSON ({error}): {word!r}") from None


def _checked_choice(given: str, field: ForeignField, value: Any) -> Any:
    if field.choices and value not in field.choices:
        raise ConfigError(f"{given}: expected one of {', '.join(map(str, field.choices))}, got {value!r}")
    return value


def read_typed(given: str, field: ForeignField, value: Any) -> Any:
    """The value of key ``given`` as a file holds it. Raises ConfigError."""
    if value is None and field.nullable:
        return None
    try:
        if field.kind == "json":
            return value
        if field.kind == "list":
            if not isinstance(value, list):
                raise ValueError(value)
            return [coerce(field.element, item) for item in value]
        return _checked_choice(given, field, coerce(field.kind, value))
    except ValueError:
        what = f"a list of {field.element}" if field.kind == "list" else EXPECTED[field.kind]
        raise ConfigError(f"{given}: expected {what}, got {value!r}") from None


def sglang_field(given: str, name: str) -> ForeignField | None:
    """The server option behind ``--sglang-<name>``; None when sglang is not installed, so unchecked.

    Raises:
        ConfigError: The run sets it itself, or SGLang has no such option.
    """
    table = sglang_fields()
    flag = name.replace("_", "-")
    field = table.get(flag) if table else None
    key = field.name if field else flag.replace("-", "_")
    if key in SGLANG_OWNED:
        raise ConfigError(f"{given} cannot be set: {SGLANG_OWNED[key]}.")
    if table is not None and field is None:
        close = nearest(flag, table)
        hint = f" Did you mean --sglang-{close}?" if close else ""
        raise ConfigError(f"{given}: SGLang's server has no option {flag!r}.{hint}")
    return field


def megatron_field(given: str, name: str) -> ForeignField | None:
    """The Megatron config field called ``name``, or None when there is none (or megatron-core is absent).

    Raises:
        ConfigError: The field follows from an option of ours, or cannot be written as text.
    """
    key = name.replace("-", "_")
    if key in OWNED:
        raise ConfigError(f"{given} cannot be set: {OWNED[key]}.")
    field = (megatron_fields() or {}).get(key)
    if field is not None and field.kind == "opaque":
        raise ConfigError(f"{given} cannot be set: Megatron takes an object here, not text.")
    return field
