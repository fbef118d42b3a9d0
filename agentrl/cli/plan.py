"""``agentrl plan``."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Annotated

from agentrl.config.layers import load_options
from agentrl.config.options import Positive, Range
from agentrl.config.presets import DEMO, model_folder
from agentrl.config.schema import Config
from agentrl.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class PlanOptions(Config):
    """What there is"""

    gpus: Positive = 1
    """GPUs of a machine, for trainer and engines together."""
    gpu_memory: Annotated[float, Range(low=0.0, low_open=True)] = 80.0
    """Memory of each GPU in GiB."""


def run(argv: Sequence[str]) -> int:
    """Print the plan; returns the exit code."""
    given = load_options(PlanOptions, argv)
    from agentrl.planning import GIB, Shape, in_gib, plans

    cfg = Config(**{field.name: getattr(given, field.name) for field in dataclasses.fields(Config)})
    folder = model_folder(given.hf_checkpoint or DEMO)
    shape = Shape.of(folder)
    tried = list(plans(cfg, shape, given.gpus, given.gpu_memory * GIB))
    if not tried:
        raise ConfigError(
            f"--gpus {given.gpus}: no layout of the model ({shape.heads} heads, {shape.groups} groups, {shape.layers} "
            "layers) with ranks, the engines and an episode a step for each replica. Give more GPUs, or other sizes."
        )
    plan = next((p for p in tried if p.fits), min(tried, key=lambda p: p.memory.trainer / p.trainer_room))
    chosen = plan.config
    nodes = chosen.actor_num_nodes
    machines = f", {chosen.world_size // nodes} on each of {nodes} machines" if nodes > 1 else ""
    lines = [
        ("model", f"{shape.parameters / 1e6:,.1f} M parameters, {shape.layers} layers, {folder}"),
        (
            "layout",
            f"{chosen.world_size} ranks = tensor {chosen.tensor_model_parallel_size} × pipeline "
            f"{chosen.pipeline_model_parallel_size} × data {chosen.data_parallel_size}{machines}; "
            f"{chosen.rollout_num_engines} engines of {chosen.rollout_num_gpus_per_engine} GPU",
        ),
        *plan.memory.lines(),
        ("room", f"{in_gib(plan.trainer_room)} for a rank, {in_gib(plan.engine_room)} for an engine rank"),
        ("KV cache", f"of an engine: {max(plan.episodes, 0):.0f} episodes of --rollout-max-context-len at a time"),
    ]
    for name, text in lines:
        print(f"{name:<16} {text}")
    if not plan.fits:
        print("\nDoes not fit, and nothing else that was tried does. Give more GPUs or memory, a smaller "
              "--max-tokens-per-gpu or --rollout-max-context-len.")  # fmt: skip
        return 1
    print("\n" + shlex.join(["agentrl", "train", *_kept(argv), *plan.flags()]))
    return 0


def _kept(argv: Sequence[str]) -> list[str]:
    """The words that ``agentrl train`` takes too, without those that say the layout."""
    kept: list[str] = []
    words = list(argv)
    while words:
        behind = list(takewhile(lambda word: not word.startswith("--"), words[1:]))
        if not words[0].startswith(_SAID_AGAIN):
            kept += [words[0], *behind]
        words = words[1 + len(behind) :]
    return kept


_SAID_AGAIN = (
    *("--gpus", "--gpu-memory", "--actor-num-gpus-per-node", "--tensor-model-parallel-size", "--recompute-granularity"),
    *("--recompute-method", "--recompute-num-layers", "--pipeline-model-parallel-size", "--rollout-num-engines"),
    *("--rollout-num-gpus-per-engine", "--use-distributed-optimizer", "--sequence-parallel"),
)
"""What the plan writes out itself."""
