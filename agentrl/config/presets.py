"""Starting values that belong to a model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.loading import toml_beside

if TYPE_CHECKING:
    from agentrl.config.schema import Config, EvalConfig

DEMO = "demo"
"""Name of the embedded model, as ``--hf-checkpoint`` and saved configurations write it."""

_TABLES: dict[str, dict[str, Any]] = toml_beside(__file__, "presets.toml")
PRESETS = {DEMO: _TABLES["demo"]}
"""Options that take the place of the general defaults when a model of this name is used."""
SUPERVISED, HALF = _TABLES["supervised"], _TABLES["half"]
"""The same with ``--loss-type sft_loss``, and with half a run (``--debug-rollout-only`` and its like)."""
TUNED_TO, STEPS, BEYOND = "search", _TABLES["steps"], _TABLES["beyond"]
"""Environment of the embedded model; what its preset has there beside the above, where none of :data:`OTHERWISE` is
given, and in others in place of it."""
OTHERWISE = (
    *("rollout_batch_size", "n_samples_per_prompt", "global_batch_size", "advantage_estimator", "loss_type"),
    *("async_buffer_size", "partial_rollout", "replay_share"),
)
LENGTHS: dict[str, int] = _TABLES["lengths"]
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
