"""Names that are not options here: close spellings, other systems' names, and what is not available yet.

`agentrl train` and `agentrl migrate` read the same tables, so that both say the same of a flag.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_ONE_SET_OF_DEVICES = "trainer and engines on the same devices"

NOT_AVAILABLE = {
    "colocate": _ONE_SET_OF_DEVICES,
    "offload": _ONE_SET_OF_DEVICES,
    "offload-train": _ONE_SET_OF_DEVICES,
    "offload-rollout": _ONE_SET_OF_DEVICES,
    "use-opd": "on-policy distillation",
    "group-rm": "a reward that sees a whole group",
    "custom-reward-post-process-path": "changing rewards between scoring and training",
    "multimodal-keys": "images in prompts",
}
"""Flags (without dashes) that users of slime know and that later versions will take, with what they are for."""

FROM_CHECKPOINT = "the model's shape is read from the checkpoint's config.json"

IMPLIED = {
    "use-fault-tolerance": "dead engines are always replaced",
    "get-mismatch-metrics": "engine and trainer are compared at every step",
    "balance-data": "micro-batches are always balanced over the ranks",
    "rollout-shuffle": "tasks are always shuffled, by --seed",
    "use-tensorboard": "TensorBoard files are always written; --no-tensorboard switches them off",
    "accumulate-allreduce-grads-in-fp32": "gradients are always summed in fp32",
    "attention-backend": "the attention follows from what is installed",
    "log-probs-chunk-size": "log-probabilities are always made in chunks",
    "loss-mask-type": "loss masks come from the token ledger, whatever the template",
    "megatron-to-hf-mode": "checkpoints are read and written in Hugging Face form",
    "train-backend": "the trainer is Megatron-core",
    "use-slime-router": "engines are always behind a router",
    "swiglu": FROM_CHECKPOINT,
    "vocab-size": FROM_CHECKPOINT,
    "make-vocab-size-divisible-by": FROM_CHECKPOINT,
    "disable-bias-linear": FROM_CHECKPOINT,
    "group-query-attention": FROM_CHECKPOINT,
    "untie-embeddings-and-output-weights": FROM_CHECKPOINT,
    "use-rotary-position-embeddings": FROM_CHECKPOINT,
    "position-embedding-type": FROM_CHECKPOINT,
    "max-position-embeddings": FROM_CHECKPOINT,
    "seq-length": FROM_CHECKPOINT,
    "post-self-attn-layernorm": FROM_CHECKPOINT,
    "post-mlp-layernorm": FROM_CHECKPOINT,
}
"""Flags of slime that ask for what is so here anyway: accepted with a note, whatever stands behind them."""

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
    "lr-wsd-decay-iters": "--lr-wsd-decay-steps",
    "end-weight-decay": "--weight-decay",
    "critic-lr-warmup-iters": "--critic-lr-warmup-steps",
    "learning-rate": "--lr",
    "batch-size": "--rollout-batch-size",
    "group-size": "--n-samples-per-prompt",
    "max-steps": "--num-rollout",
    "temperature": ("--rollout-temperature", "--eval-temperature"),
    "rollout-temperature": "--eval-temperature",
    "top-p": ("--rollout-top-p", "--eval-top-p"),
    "rollout-top-p": "--eval-top-p",
    "max-tokens": "--rollout-max-response-len",
    "eval-max-prompt-len": "--eval-max-context-len",
    "rollout-max-prompt-len": "--rollout-max-context-len",
    "rollout-seed": "--seed",
    "stop": "--rollout-stop",
    "task-ids": ("--task-id",),
    "time-limit": ("--eval-time-limit",),
    "num-trials": "--n-samples-per-eval-prompt",
    "step": ("--checkpoint",),
    "resume": ("--load", "--output-dir"),
    "calculate-per-token-loss": "--loss-agg-mode token-mean",
    "disable-grpo-std-normalization": "--no-grpo-std-normalization",
    "skip-eval-before-train": ("--no-eval-before-train",),
    "norm-epsilon": "--layernorm-epsilon",
    "num-experts": "--num-moe-experts",
    "num-virtual-stages-per-pipeline-rank": "--virtual-pipeline-model-parallel-size",
    "decoder-first-pipeline-num-layers": "--num-layers-in-first-pipeline-stage",
    "decoder-last-pipeline-num-layers": "--num-layers-in-last-pipeline-stage",
    "sglang-server-concurrency": "--rollout-concurrency",
    "env-args": "--env-arg",
    "num-gpus": "--actor-num-gpus-per-node and --rollout-num-gpus",
    "concurrency": "--rollout-concurrency",
    "limit": "--eval-tasks",
    "wandb": "--use-wandb",
}
"""Names of the same thing elsewhere (slime, Megatron, TRL), with the flag to use here; of several the first that
the command takes."""

ADVICE = {
    "normalize-advantages": "--advantage-estimator reinforce_plus_plus and reinforce_plus_plus_baseline normalize over "
    "the batch, grpo within each group.",
    "custom-tis-function-path": "--advantage-estimator FILE:CLASS: its correction(batch) gives each token's weight.",
    "custom-advantage-function-path": "--advantage-estimator FILE:CLASS: its credit(batch) gives each token's own.",
    "disable-rewards-normalization": "--advantage-estimator says how rewards are compared; dr_grpo and rloo divide by "
    "nothing.",
    "eval-config": "Name each held-out set by --eval-prompt-data NAME PATH; a file of options is --config FILE.",
    "rollout-function-path": "--custom-generate-function-path replaces how one episode is played.",
    "num-epoch": "Give --num-rollout: epochs × tasks ÷ --rollout-batch-size.",
    "tool-key": "Tools belong to the environment: a ToolEnv lists them in `tools`. For supervised training "
    "(--loss-type sft_loss) they are in the rows of --train-data, as `tools`.",
    "start-rollout-id": "--load RUN goes on where the run stopped, --load RUN/checkpoints/step_N goes back.",
    "save-debug-rollout-data": "Every rollout is stored in the run folder as Parquet; --load-debug-rollout-data RUN "
    "trains on it again, `agentrl show RUN` reads it.",
    "reward-key": "A reward is one number, or named parts that are added up; return only what should count.",
    "eval-reward-key": "A reward is one number, or named parts that are added up; return only what should count.",
    "rollout-top-k": "Training samples from all tokens, because log-probabilities are of the full softmax.",
    "rollout-stop-token-ids": "Give the text of these tokens to --rollout-stop.",
    "eval-input-key": "Of one held-out set: --env-arg NAME.input_key=KEY, with the NAME of --eval-prompt-data.",
    "eval-label-key": "Of one held-out set: --env-arg NAME.label_key=KEY, with the NAME of --eval-prompt-data.",
    "save-retain-interval": "--keep-last N keeps the newest checkpoints, --best-metric the best one beside them.",
    "wandb-key": "Set the variable WANDB_API_KEY; a key on the command line can be read by everybody on the machine.",
    "wandb-group": "Set the variable WANDB_RUN_GROUP.",
    "wandb-team": "Set the variable WANDB_ENTITY.",
    "tensorboard-dir": "TensorBoard files are in the run folder, see --output-dir.",
    "num-layers-per-virtual-pipeline-stage": "Give --virtual-pipeline-model-parallel-size: the layers of a pipeline "
    "stage ÷ this number.",
    "lr-warmup-fraction": "Give --lr-warmup-steps: the fraction × --num-rollout × --num-steps-per-rollout.",
}
"""Flags of slime that have no flag for themselves here, with what to do."""


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """The candidate most like ``name``, or None when nothing is close."""
    found = difflib.get_close_matches(name.lower(), list(candidates), n=1, cutoff=0.6)
    return found[0] if found else None


def renamed(bare: str, known: Iterable[str]) -> str | None:
    """The flag to use for ``bare``: of several names, one that is among ``known``."""
    names, known = RENAMED.get(bare, ()), list(known)
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
        return f"{given}: not available yet: {NOT_AVAILABLE[bare]}."
    if bare in ADVICE:
        return f"Unknown {noun} {given}. {ADVICE[bare]}"
    known = list(candidates)
    right = renamed(bare, known)
    if right is not None:
        return f"Unknown {noun} {given}. Use {right if as_flag else right.lstrip('-').replace('-', '_')}."
    close = nearest(bare, known)
    if close is None:
        return f"Unknown {noun} {given}. `--help` lists all of them."
    return f"Unknown {noun} {given}. Did you mean {'--' + close if as_flag else close.replace('-', '_')}?"
