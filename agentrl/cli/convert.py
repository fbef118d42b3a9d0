"""``agentrl convert``."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.cli.extras import require
from agentrl.config.layers import load_options
from agentrl.config.options import PathText
from agentrl.config.presets import model_folder
from agentrl.errors import ConfigError
from agentrl.families.torch_dist import is_megatrons


@dataclass(frozen=True, kw_only=True)
class Options:
    """Conversion"""

    hf_checkpoint: PathText | None = None
    """Model in Hugging Face form. It is converted; with --load, it says architecture and tokenizer of what is."""
    load: PathText | None = None
    """Checkpoint of Megatron's to make a Hugging Face folder of: a folder with latest_checkpointed_iteration.txt, of
    which the newest is taken, or one iteration. Only its model is read, whatever layout it was saved at."""
    output_dir: PathText | None = None
    """Folder to write; it must not hold anything yet."""


def run(argv: Sequence[str]) -> int:
    """Convert; returns the exit code."""
    given = load_options(Options, argv)
    if given.output_dir is None:
        raise ConfigError("agentrl convert needs --output-dir DIR, a new folder.")
    if given.hf_checkpoint is None:
        why = "a checkpoint of Megatron's does not say its architecture and has no tokenizer" if given.load else (
            "the model to convert"
        )
        raise ConfigError(f"agentrl convert needs --hf-checkpoint MODEL: {why}.")
    target, model = Path(given.output_dir), Path(model_folder(given.hf_checkpoint))
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"--output-dir {target} holds something already; give a new folder")
    if not (model / "config.json").is_file() and is_megatrons(model):
        raise ConfigError(
            f"--hf-checkpoint {model} is a checkpoint of Megatron's: give it with --load, and the Hugging Face folder "
            "of its architecture with --hf-checkpoint"
        )
    require("convert", ("torch", "megatron.core", "transformers", "safetensors"))
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from agentrl.trainer.megatron.dist_checkpoint import to_dist, to_hf

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    if given.load is None:
        to_dist(model, target, say)
    else:
        to_hf(Path(given.load), model, target, say)
    print(f"wrote {target}")
    return 0
