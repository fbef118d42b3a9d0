"""What a spawned process runs in the tests of parallel layouts. Importable, as spawning needs it."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from pathlib import Path

import numpy as np

from tests.trainer.samples import QUIET, fresh, join, log_probs, random_batch, train

OPTIONS = dict(
    lr=1e-3, use_kl_loss=True, kl_loss_coef=0.1, entropy_coef=0.01, rollout_temperature=0.8, max_tokens_per_gpu=150,
    distributed_timeout_minutes=2, **QUIET,
)  # fmt: skip
WITH_CRITIC = {**OPTIONS, "advantage_estimator": "ppo", "critic_lr": 2e-3}
LAYOUTS = {
    "tp2": {"tensor_model_parallel_size": 2},
    "tp2 sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
    "pp2 interleaved": {"pipeline_model_parallel_size": 2, "megatron": {"virtual_pipeline_model_parallel_size": 2}},
    "dp2": {},
    "dp2 dist": {"use_distributed_optimizer": True},
    # Weights that arrive in the next forward pass: what is exported and saved must be current nevertheless.
    "dp2 late gather": {
        "use_distributed_optimizer": True,
        "megatron": {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 20_000},
    },
}

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
MORE = {
    "tp2 full": {"tensor_model_parallel_size": 2, "megatron": FULL},
    "tp2 sp full": {"tensor_model_parallel_size": 2, "sequence_parallel": True, "megatron": FULL},
    "tp2 sp selective": {
        "tensor_model_parallel_size": 2, "sequence_parallel": True, "megatron": {"recompute_granularity": "selective"},
    },
    "tp2 sp mlp": {"tensor_model_parallel_size": 2, "sequence_parallel": True, "recompute_activations": True},
    "pp2 full": {
        "pipeline_model_parallel_size": 2, "megatron": {**FULL, "recompute_method": "block", "recompute_num_layers": 2},
    },
    "pp2 interleaved full": {
        "pipeline_model_parallel_size": 2, "megatron": {**FULL, "virtual_pipeline_model_parallel_size": 2},
    },
    "pp2 uneven": {"pipeline_model_parallel_size": 2, "megatron": {"num_layers_in_first_pipeline_stage": 1}},
    "dp2 dist full": {"use_distributed_optimizer": True, "megatron": FULL},
}  # fmt: skip
"""More layouts of two ranks, among them each way to recompute."""
FOUR = {
    "tp2 pp2": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
    "tp2 pp2 sp": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "sequence_parallel": True},
    "tp2 pp2 interleaved": {
        "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2,
        "megatron": {"virtual_pipeline_model_parallel_size": 2},
    },
    "pp4": {"pipeline_model_parallel_size": 4},
    "tp2 dp2": {"tensor_model_parallel_size": 2},
    "tp2 dp2 sp dist": {
        "tensor_model_parallel_size": 2, "sequence_parallel": True, "use_distributed_optimizer": True
    },
    "pp2 dp2": {"pipeline_model_parallel_size": 2, "recompute_activations": True},
    "pp2 dp2 dist late gather": {**LAYOUTS["dp2 late gather"], "pipeline_model_parallel_size": 2},
    "pp2 interleaved dp2 dist late gather": {
        "pipeline_model_parallel_size": 2, "use_distributed_optimizer": True,
        "megatron": {"virtual_pipeline_model_parallel_size": 2, **LAYOUTS["dp2 late gather"]["megatron"]},
    },
}  # fmt: skip
"""Layouts of four ranks."""
BF16 = {
    "tp2 sp": LAYOUTS["tp2 sp"],
    "pp2 interleaved": LAYOUTS["pp2 interleaved"],
    "dp2 dist": LAYOUTS["dp2 dist"],
}
"""Layouts that are also run with weights in bfloat16, gradients and what the optimizer holds in float32."""

ESTIMATORS = {
    "tp2 gspo": {
        "tensor_model_parallel_size": 2, "advantage_estimator": "gspo", "use_tis": True, "tis_level": "geometric",
        "tis_mode": "mask", "overlong_handling": "penalty", "overlong_max_len": 30, "overlong_buffer_len": 20,
    },
    "dp2 dr_grpo": {
        "advantage_estimator": "dr_grpo", "loss_scale_factor": 50, "credit_level": "turn", "use_tis": True,
        "use_rs": True, "rs_level": "geometric", "rs_lower_bound": 0.9, "kl_loss_type": "k3", "use_unbiased_kl": True,
        "eps_clip_c": 3.0, "kl_coef": 0.1, "use_opsm": True,
    },
    "tp2 sft_loss": {"tensor_model_parallel_size": 2, "loss_type": "sft_loss", "use_kl_loss": False},
    "pp2 sft_loss": {"pipeline_model_parallel_size": 2, "loss_type": "sft_loss", "use_kl_loss": False},
}  # fmt: skip
"""Estimators and corrections on two ranks. A trajectory's two segments may lie on different ones."""


def one_step(trainer) -> dict:
    """What the loop does with a batch: infer, credit, update; on log-probabilities near the trainer's."""
    batch = random_batch(12, segments=2)
    if trainer.algorithm.name == "sft_loss":
        batch = replace(batch, columns={})
        return trainer.update(batch.with_columns(**trainer.algorithm.prepare(batch)), num_steps=2)[0]
    noise = np.random.default_rng(1).normal(0, 0.1, batch.num_tokens).astype(np.float32)
    batch = fresh(batch.with_columns(rollout=(log_probs(trainer, batch) + noise) * batch.loss_mask))
    batch = batch.with_columns(**trainer.infer(batch, trainer.algorithm.infers(batch.steps(2))))
    batch = batch.with_columns(**trainer.algorithm.prepare(batch), age=batch.loss_mask.astype(np.int32))
    return trainer.update(batch, num_steps=2)[0] | trainer.algorithm.metrics(batch)


def measure(trainer, folder: Path, original: dict) -> dict:
    """Two training steps, log-probabilities, export and state, as plain numbers."""
    import torch

    exact = all(torch.equal(original[n], t) for n, t in trainer.export())
    batch = random_batch(12)
    values = [log_probs(trainer, batch)]
    steps = [train(trainer, batch), train(trainer, batch, 2)]
    # One sample for two ranks: one of them has an empty micro-batch.
    steps.append(train(trainer, random_batch(1)))
    trainer.save(folder / "state")
    trainer.save_hf(folder / "hf")
    keys = ("loss", "grad_norm", "kl_loss", "entropy", "clip_fraction", "logprob_abs_diff_max", "ess")
    metrics = [f"train/{key}" for key in keys]
    if trainer.critic is not None:
        values.append(log_probs(trainer, batch, "values"))
        of_critic = ("value_loss", "grad_norm", "value_clip_fraction", "explained_variance")
        metrics += [f"critic/{key}" for key in of_critic]
    if trainer.layout.rank == 0:
        np.save(folder / "log_probs.npy", values)
    return {"export_exact": exact, "steps": [{k: s[k] for k in metrics} for s in steps]}


RELOADS = {
    "tp2 sp to pp2 interleaved": "tp2 sp", "pp2 interleaved to dp2 dist": "pp2 interleaved",
    "dp2 dist to tp2": "dp2 dist", "alone to dp2 dist": "alone", "alone to pp2": "alone",
}  # fmt: skip
"""A layout that loads the state of another -> the latter. ``alone`` is one rank."""


def run_layouts(
    rank: int,
    listeners: dict[str, socket.socket],
    layouts: dict[str, dict],
    ranks: int,
    checkpoint: str,
    out: str,
    options: dict,
) -> dict[str, dict]:
    """These layouts of so many ranks in this process, one after the other; rank 0 also writes ``<ranks>.json``."""
    from safetensors.torch import load_file

    from agentrl.config.schema import TrainerOptions

    original, results = load_file(Path(checkpoint) / "model.safetensors"), {}
    for name, layout in layouts.items():
        trainer = join(rank, ranks, listeners[name], checkpoint, TrainerOptions(**options, **layout))
        folder = Path(out) / name
        folder.mkdir(exist_ok=True)
        results[name] = measure(trainer, folder, original)
        trainer.close()
        if rank == 0:
            (Path(out) / f"{ranks}.json").write_text(json.dumps(results))
    return results


OFFLOADED = {f"{name} offloaded": name for name in ("tp2 sp", "dp2 late gather")}
"""Layouts whose ranks give their memory back between their turns."""


def three_steps(trainer, *, offloads: bool = False):
    """Three times what a turn of the trainer is; exported weights at the end."""
    for seed in range(3):
        if offloads:
            assert trainer.release_memory() > 0 and trainer.release_memory() == 0
            trainer.resume_memory()
        log_probs(trainer, random_batch(12, seed=seed))
        train(trainer, random_batch(12, seed=seed), 2)
        list(trainer.export())
    return {name: tensor.clone() for name, tensor in trainer.export()}


def run(rank: int, listeners: dict[str, socket.socket], checkpoint: str, out: str) -> None:
    """Every layout of two ranks in this process, one after the other."""
    import torch
    from safetensors.torch import load_file

    from agentrl.config.schema import TrainerOptions

    results = run_layouts(rank, listeners, LAYOUTS, 2, checkpoint, out, WITH_CRITIC)
    for name, changes in ESTIMATORS.items():
        options = TrainerOptions(**{**OPTIONS, "use_rollout_logprobs": False, **changes})
        trainer = join(rank, 2, listeners[name], checkpoint, options)
        results[name] = one_step(trainer)
        trainer.close()
    for key, name in OFFLOADED.items():
        exports = []
        for offloads in (False, True):
            options = TrainerOptions(**WITH_CRITIC, **LAYOUTS[name])
            trainer = join(rank, 2, listeners[f"{key} {offloads}"], checkpoint, options)
            exports.append(three_steps(trainer, offloads=offloads))
            trainer.close()
        results[key] = {"exact": all(torch.equal(exports[0][n], t) for n, t in exports[1].items())}
    for key, source in RELOADS.items():
        options = TrainerOptions(**WITH_CRITIC, **LAYOUTS[key.split(" to ")[1]])
        trainer = join(rank, 2, listeners[key], checkpoint, options)
        trainer.load(Path(out) / source / "state")
        saved = load_file(Path(out) / source / "hf" / "model.safetensors")
        results[key] = {"exact": all(torch.equal(saved[n], t) for n, t in trainer.export())}
        trainer.save(Path(out) / key / "state")
        results[key] |= {"loss": train(trainer, random_batch(12))["train/loss"]}
        trainer.close()
    if rank == 0:
        (Path(out) / "results.json").write_text(json.dumps(results))


SPLIT = {
    "smollm3 tp2 sp": ("smollm3", {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "glm4 tp2 sp": ("glm4", {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "qwen2_moe tp2 sp": ("qwen2_moe", {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "qwen3_moe ep2": ("qwen3_moe", {"expert_model_parallel_size": 2}),
    "mixtral ep2 dist": ("mixtral", {"expert_model_parallel_size": 2, "use_distributed_optimizer": True}),
    "glm4_moe ep2 tp2 sp": (
        "glm4_moe",
        {"expert_model_parallel_size": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True},
    ),
    "deepseek_v3 pp2": ("deepseek_v3", {"pipeline_model_parallel_size": 2}),
    "deepseek_v3 tp2 sp": ("deepseek_v3", {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
}
"""Two ranks for a family in each way that splits something of it."""


def run_families(rank: int, listeners: dict[str, socket.socket], checkpoints: dict[str, str], out: str) -> None:
    """Every layout of :data:`SPLIT` in this process, one after the other."""
    from safetensors.torch import load_file

    from agentrl.config.schema import TrainerOptions

    results = {}
    for name, (family, layout) in SPLIT.items():
        trainer = join(rank, 2, listeners[name], checkpoints[family], TrainerOptions(**OPTIONS, **layout))
        folder = Path(out) / name
        folder.mkdir(exist_ok=True)
        results[name] = measure(trainer, folder, load_file(Path(checkpoints[family]) / "model.safetensors"))
        if name == "mixtral ep2 dist":
            trainer.load(Path(out) / "mixtral alone" / "state")
            trainer.save(folder / "of one")
        trainer.close()
        if rank == 0:
            (Path(out) / "families.json").write_text(json.dumps(results))


DIST = {
    "qwen3 tp2": ("qwen3", {"tensor_model_parallel_size": 2}),
    "qwen3 pp2": ("qwen3", {"pipeline_model_parallel_size": 2}),
    "mixtral ep2": ("mixtral", {"expert_model_parallel_size": 2}),
    "deepseek_v3 tp2 sp": ("deepseek_v3", {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
}
"""Two ranks that save, as Megatron-LM does, what one process converts."""


def run_dist(rank: int, listeners: dict[str, socket.socket], checkpoints: dict[str, str], out: str) -> None:
    """Save each of :data:`DIST` with Megatron; load what was converted for one, where the names are this spec's."""
    import torch

    from agentrl.config.schema import TrainerOptions
    from agentrl.trainer.megatron.dist_checkpoint import dist_checkpointing

    for name, (family, layout) in DIST.items():
        trainer = join(rank, 2, listeners[name], checkpoints[family], TrainerOptions(**OPTIONS, **layout))
        model, folder = trainer.policy.core.model, Path(out) / name / "iter_0000003"
        if rank == 0:
            folder.mkdir(parents=True)
        torch.distributed.barrier()
        dist_checkpointing.save({"model": model.sharded_state_dict()}, str(folder))
        if family == "qwen3":
            expected = {key: value.clone() for key, value in model.named_parameters()}
            for value in model.parameters():
                value.data.zero_()
            converted = str(Path(out) / "converted" / "release")
            model.load_state_dict(dist_checkpointing.load({"model": model.sharded_state_dict()}, converted)["model"])
            assert all(torch.equal(value, expected[key]) for key, value in model.named_parameters()), name
        trainer.close()
