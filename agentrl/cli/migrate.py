"""``agentrl migrate``: a launch script of slime as a command of ours."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from agentrl.config.script import read_script, translate
from agentrl.errors import ConfigError


def run(argv: Sequence[str]) -> int:
    """Print the command; returns the exit code."""
    if len(argv) != 1 or argv[0].startswith("-"):
        raise ConfigError("agentrl migrate takes one launch script of slime: agentrl migrate run.sh")
    program, flags, absent = read_script(Path(argv[0]).expanduser())
    translations = translate(program, flags)
    rows = [(str(t.given).replace("\n", " "), f"{'' if t.kept else 'left out: '}{t.remark}") for t in translations]
    rows += [(name, "set nowhere in the script, nor in files that it sources and that are here") for name in absent]
    width = min(max((len(given) for given, _ in rows), default=0), 44)
    print(f"# {argv[0]} for agentrl. What became of each flag:")
    for given, remark in rows:
        print(f"#   {given:<{width}}  {remark}")
    print(" \\\n    ".join(["agentrl train", *(str(t.kept) for t in translations if t.kept is not None)]))
    return 0
