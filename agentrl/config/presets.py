"""Starting values that belong to a model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentrl.config.schema import Config, EvalConfig

DEMO = "demo"
"""Name of the embedded model, as ``--hf-checkpoint`` and saved configurations write it."""

PRESETS: dict[str, dict[str, Any]] = {
    DEMO: {
        "num_rollout": 9,
        "rollout_batch_size": 16,
        "n_samples_per_prompt": 8,
        "lr": 2e-4,
        "lr_decay_style": "constant",
        "eps_clip": 0.2,
        "eps_clip_high": 0.28,
        "rollout_temperature": 1.0,
        "rollout_max_response_len": 64,
        "rollout_max_context_len": 512,
        "max_turns": 6,
        "eval_interval": 3,
        "eval_tasks": 200,
        "save_interval": 3,
        "dtype": "fp32",
        "seed": 0,
    }
}
"""Options that take the place of the general defaults when a model of this name is used."""

SUPERVISED: dict[str, Any] = {"n_samples_per_prompt": 1, "eval_interval": 0}
"""Options that take the place of the defaults with ``--loss-type sft_loss``: nothing is played."""

HALF: dict[str, Any] = {"eval_interval": 0}
"""Options that take the place of the defaults with ``--debug-rollout-only`` and ``--load-debug-rollout-data``: the
model does not change, or there is no engine."""

TUNED_TO = "search"
STEPS = {"num_steps_per_rollout": 4}
"""What it has for ``TUNED_TO`` beside the above, where none of :data:`OTHERWISE` is given: it learns in a third of the
rollouts that one step for each takes."""
OTHERWISE = ("rollout_batch_size", "n_samples_per_prompt", "global_batch_size", "advantage_estimator", "loss_type")
BEYOND = {"rollout_max_response_len": 128, "rollout_max_context_len": 1920, "max_turns": 8}
"""What the preset of the embedded model has in place of the above in environments other than ``TUNED_TO``: of their
prompts and tool results 512 tokens do not hold an episode. The model has 2,048 positions."""


LENGTHS = {"rollout_max_context_len": 8192, "rollout_max_response_len": 1024}
"""Tokens of an episode and of a turn, of models that have positions for them."""


def preset(name: str, environments: Sequence[str]) -> dict[str, Any]:
    """Starting values of the model ``name``, or of the model in that folder, for these environments."""
    if name not in PRESETS:
        return _lengths(Path(name))
    return {**PRESETS[name], **({} if set(environments) == {TUNED_TO} else BEYOND)}


def _lengths(folder: Path) -> dict[str, int]:
    """Smaller lengths for a model with fewer positions, so that it runs without being told."""
    try:
        positions = json.loads((folder / "config.json").read_text(encoding="utf-8"))["max_position_embeddings"]
    except (OSError, ValueError, KeyError, TypeError):  # the check of the model says what is wrong with it
        return {}
    if not isinstance(positions, int) or not 1 < positions < LENGTHS["rollout_max_context_len"]:
        return {}
    return {
        "rollout_max_context_len": positions,
        "rollout_max_response_len": min(LENGTHS["rollout_max_response_len"], positions // 2),
    }


def demo_alone(config: Config | EvalConfig) -> str | None:
    """What to know of the embedded model where it plays something else than it was made for; None otherwise."""
    env = (config.env,) if isinstance(config.env, str) else config.env
    own = any(key.rpartition(".")[2] in ("train_data", "test_data") for key in config.env_args)
    if not getattr(config, "plays", True):
        return None
    if config.hf_checkpoint != str(demo_folder()) or (set(env) == {TUNED_TO} and not own):
        return None
    return (
        f"the embedded demo model knows the words of `{TUNED_TO}`'s own world and nothing else: here it runs, but it "
        "cannot learn. Give a model of yours with --hf-checkpoint"
    )


def model_folder(named: str) -> str:
    """The folder of a model as ``--hf-checkpoint`` names it: the embedded one may be named ``demo``."""
    return str(demo_folder()) if named == DEMO else named


def demo_folder() -> Path:
    """Folder of the embedded model."""
    return Path(__file__).resolve().parent.parent / "assets" / "demo"
