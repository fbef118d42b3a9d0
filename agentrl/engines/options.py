"""From the options of a run to the engines that serve it."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

from agentrl.config.schema import Config, EvalConfig, ServeOptions
from agentrl.engines.engine import EngineSpec
from agentrl.engines.world import World
from agentrl.errors import ConfigError

CONTEXT_MARGIN = 64
"""Tokens of a context that SGLang keeps for itself, with some to spare."""


def engine_spec(cfg: Config | EvalConfig, model_dir: str, world: World) -> EngineSpec:
    """What each engine of a run serves, and on what.
    Raises ConfigError: ``--deterministic`` in a precision for which the CPU cannot offer it; memory cannot be given
    back."""
    gpu, mem_fraction, gives_back = world.has_gpu, None, False
    if isinstance(cfg, Config):
        mem_fraction, gives_back = world.engine_memory(cfg), cfg.takes_turns and bool(cfg.offload_rollout)
    if gpu and gives_back and importlib.util.find_spec("torch_memory_saver") is None:
        raise ConfigError(
            "--colocate: engines give GPU memory back by the package torch_memory_saver, which is not installed. It "
            'comes with SGLang\'s own requirements: pip install "agentrl-toolkit[gpu]", or pip install '
            "torch_memory_saver. Without it: --no-offload-rollout, if both sides fit into the memory."
        )
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
        gives_back=gives_back,
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
