"""From the options of a run to the engines that serve it."""

from __future__ import annotations

import json
import os
from pathlib import Path

from agentrl.config.schema import Config, EvalConfig, ServeOptions
from agentrl.engines.engine import EngineSpec
from agentrl.engines.world import World
from agentrl.errors import ConfigError

CONTEXT_MARGIN = 64
"""Tokens of a context that SGLang keeps for itself, with some to spare."""


def engine_spec(
    cfg: Config | EvalConfig, model_dir: str, world: World, *, mem_fraction: float | None = None
) -> EngineSpec:
    """What each engine of a run serves, and on what.

    Args:
        mem_fraction: share of a GPU's memory that it takes; None: SGLang's choice.

    Raises:
        ConfigError: ``--deterministic`` in a precision for which the CPU cannot offer it.
    """
    gpu = world.has_gpu
    if cfg.deterministic and not gpu and cfg.dtype == "bf16":
        raise ConfigError("--deterministic on the CPU computes in fp32: leave --dtype bf16 out.")
    dtype = {"bf16": "bfloat16", "fp32": "float32", "auto": None}[cfg.dtype]
    cpu_tokens = max(2, min(cfg.rollout_concurrency, 128)) * cfg.longest_context
    extra = dict(cfg.sglang)
    return EngineSpec(
        model_path=model_dir,
        device=world.device,
        dtype=dtype,
        tp=world.engine_ranks(cfg),
        mem_fraction=mem_fraction,
        max_total_tokens=None if gpu else min(cpu_tokens, 131072),
        context_length=_context_length(cfg, model_dir),
        threads=1 if cfg.deterministic else cfg.threads or engine_threads(cfg),
        seed=cfg.seed,
        deterministic=cfg.deterministic,
        extra=extra,
    )


def _context_length(cfg: Config | EvalConfig, model_dir: str) -> int:
    """What the engine is told. SGLang keeps a few tokens of it for itself, so it gets more than an episode uses."""
    wanted = cfg.longest_context + CONTEXT_MARGIN
    config = json.loads((Path(model_dir) / "config.json").read_text())
    trained = config.get("max_position_embeddings")
    return wanted if trained is None else max(min(wanted, trained), cfg.longest_context)


def engine_threads(cfg: Config | EvalConfig | ServeOptions) -> int:
    """Cores divided among engines. Trainer and engines take turns, so each side may use them all."""
    return max(1, (os.cpu_count() or 1) // max(cfg.rollout_num_engines or 1, 1))
