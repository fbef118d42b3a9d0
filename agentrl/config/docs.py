"""Writes ``docs/configuration.md`` from the option declarations: ``python -m agentrl.config.docs [FILE]``."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

from agentrl.config.foreign import SGLANG_OWNED
from agentrl.config.help import default_text, flag_text
from agentrl.config.megatron_options import ACTS, CHECKPOINT, ONLY, OWNED
from agentrl.config.names import IMPLIED, NOT_AVAILABLE
from agentrl.config.options import Option, options
from agentrl.config.parse import ALIASES
from agentrl.config.presets import BEYOND, OTHERWISE, PRESETS, STEPS, SUPERVISED, TUNED_TO
from agentrl.config.schema import Config, EvalConfig

PAGE = Path(__file__).parents[1] / "assets" / "configuration.md"
"""The page with places for what the declarations say."""


def _row(option: Option) -> str:
    default = default_text(option)
    limits = f" ({option.range})" if option.range is not None else ""
    cells = (f"`{flag_text(option)}`", f"`{default}`" if default else "", option.doc + limits)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _tables(entries: Iterable[Option]) -> str:
    lines = []
    for group, members in groupby(entries, key=lambda option: option.group):
        lines += [f"### {group}", "", "| flag | default | |", "|---|---|---|", *map(_row, members), ""]
    return "\n".join(lines)


def _preset(name: str) -> str:
    train = options(Config)
    rows = "\n".join(f"| `{train[key].flag}` | `{value}` |" for key, value in PRESETS[name].items())
    beyond = ", ".join(f"`{train[key].flag} {value}`" for key, value in BEYOND.items())
    steps = ", ".join(f"`{train[key].flag} {value}`" for key, value in STEPS.items())
    otherwise = ", ".join(f"`{train[key].flag}`" for key in OTHERWISE)
    return (
        f"**`{name}`**: the embedded model, used when `--hf-checkpoint` is not given.\n\n"
        f"| option | value |\n|---|---|\n{rows}\n\nIn `{TUNED_TO}`, where none of {otherwise} is given: {steps}. "
        f"In other environments: {beyond}."
    )


def render() -> str:
    """The whole page."""
    train, evaluation = options(Config), options(EvalConfig)
    second = ALIASES["EvalConfig"].items()
    shared = [f"--{o.flag[2:]}" for name, o in evaluation.items() if name in train and o.kind != "passthrough"]
    return PAGE.read_text(encoding="utf-8").format(
        train=_tables(train.values()),
        own=_tables(option for name, option in evaluation.items() if name not in train),
        shared=_listed(shared),
        aliases=", ".join(f"`--{alias}` is `{evaluation[name].flag}`" for alias, name in second),
        presets="\n\n".join(map(_preset, PRESETS)),
        supervised=_listed(f"{train[key].flag} {value}" for key, value in SUPERVISED.items()),
        sglang=_listed(SGLANG_OWNED),
        acts=_listed(sorted(ACTS)),
        checkpoint=_listed(CHECKPOINT),
        only=_listed(f"{name} {value}" for name, (value, _) in ONLY.items()),
        owned=_listed(name for name in OWNED if name not in train),
        not_available=_listed(f"--{name}" for name in NOT_AVAILABLE),
        implied="\n".join(f"| `--{name}` | {reason} |" for name, reason in IMPLIED.items()),
    )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(render(), encoding="utf-8")
    else:
        print(render(), end="")
