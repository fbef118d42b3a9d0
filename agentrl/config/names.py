"""Names that are not options here: close spellings, other systems' names, and what is not available yet."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

NOT_AVAILABLE = {
    "colocate": "trainer and engines on the same devices",
    "offload-train": "trainer and engines on the same devices",
    "offload-rollout": "trainer and engines on the same devices",
    "over-sampling-batch-size": "over-sampling",
    "dynamic-sampling-filter-path": "dynamic sampling filters",
    "buffer-filter-path": "buffer filters",
    "partial-rollout": "partial rollouts",
    "async-buffer-size": "asynchronous training",
    "update-weights-interval": "asynchronous training",
    "max-staleness": "asynchronous training",
    "kl-coef": "KL divergence as part of the reward; --use-kl-loss is available",
    "use-tis": "importance-sampling correction",
    "use-fault-tolerance": "switching fault tolerance off; dead engines are always replaced",
    "auto-resume": "restarting by itself; --load RUN continues a run",
    "gamma": "PPO",
    "lambd": "PPO",
    "num-critic-only-steps": "PPO",
}
"""Flags (without dashes) that users of slime know and that later versions will take, with what they are for."""

RENAMED = {
    "bf16": "--dtype bf16",
    "fp16": "--dtype bf16",
    "fp32": "--dtype fp32",
    "params-dtype": "--dtype",
    "pipeline-dtype": "--dtype",
    "autocast-dtype": "--dtype",
    "model-path": "--hf-checkpoint",
    "tokenizer-path": "--hf-checkpoint",
    "ref-model": "--ref-load",
    "train-iters": "--num-rollout",
    "lr-warmup-iters": "--lr-warmup-steps",
    "learning-rate": "--lr",
    "batch-size": "--rollout-batch-size",
    "group-size": "--n-samples-per-prompt",
    "max-steps": "--num-rollout",
    "temperature": ("--rollout-temperature", "--eval-temperature"),
    "rollout-temperature": "--eval-temperature",
    "top-p": ("--rollout-top-p", "--eval-top-p"),
    "rollout-top-p": "--eval-top-p",
    "max-tokens": "--rollout-max-response-len",
    "eval-max-response-len": "--rollout-max-response-len",
    "eval-max-context-len": "--rollout-max-context-len",
    "task-ids": ("--task-id",),
    "time-limit": ("--eval-time-limit",),
    "num-trials": "--n-samples-per-eval-prompt",
    "step": ("--checkpoint",),
    "resume": ("--load", "--output-dir"),
    "disable-grpo-std-normalization": "--no-grpo-std-normalization",
    "env-args": "--env-arg",
    "num-gpus": "--actor-num-gpus-per-node and --rollout-num-gpus",
    "concurrency": "--rollout-concurrency",
    "limit": "--eval-tasks",
    "wandb": "--use-wandb",
}
"""Names of the same thing elsewhere (slime, Megatron, TRL), with the flag to use here; of several the first that
the command takes."""


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """The candidate most like ``name``, or None when nothing is close."""
    found = difflib.get_close_matches(name.lower(), list(candidates), n=1, cutoff=0.6)
    return found[0] if found else None


def _renamed(bare: str, known: list[str]) -> str | None:
    """The flag to use for ``bare``: of several names, one that is among ``known``."""
    names = RENAMED.get(bare, ())
    if isinstance(names, str):
        return names
    return next((name for name in names if name[2:] in known), None)


def unknown_message(given: str, bare: str, candidates: Iterable[str], *, as_flag: bool) -> str:
    """What to say of an unknown flag or key.

    Args:
        given: As the person wrote it, with where (``--lrr`` or ``run.toml: lrr``).
        bare: The name in flag spelling without dashes.
        candidates: All names that would be right, in the same spelling.
        as_flag: Whether to suggest ``--name`` or ``name`` with underscores, as in a file.
    """
    noun = "flag" if as_flag else "key"
    if bare in NOT_AVAILABLE:
        return f"{given}: {NOT_AVAILABLE[bare]} is not available yet in this version."
    known = list(candidates)
    right = _renamed(bare, known)
    if right is not None:
        return f"Unknown {noun} {given}. Use {right if as_flag else right.lstrip('-').replace('-', '_')}."
    close = nearest(bare, known)
    if close is None:
        return f"Unknown {noun} {given}. `--help` lists all of them."
    return f"Unknown {noun} {given}. Did you mean {'--' + close if as_flag else close.replace('-', '_')}?"
