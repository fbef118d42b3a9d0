"""The trainer on one rank, in this process: real Megatron-core against transformers and float64."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from agentrl.algorithms import ALGORITHMS, TrainBatch
from agentrl.config.megatron_options import layout_problems
from agentrl.config.schema import OptimizerOptions, ParallelOptions
from agentrl.data.writes import Writes
from agentrl.errors import CheckpointError, ConfigError, GradientError
from tests.trainer.samples import fresh, log_probs, random_batch, tiny_checkpoint, train

EACH_ALONE = {"use_dynamic_batch_size": False, "micro_batch_size": 1}


def hf_model(path, dtype=torch.float32):
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype)


def hf_log_probs(model, batch: TrainBatch, temperature=1.0):
    """Log-probabilities of the sampled tokens, each sequence alone: tensor with gradient, in order."""
    out = []
    for tokens, mask in zip(np.split(batch.tokens, np.cumsum(batch.lengths)[:-1]), masks(batch), strict=True):
        ids = torch.from_numpy(tokens).long()
        table = (model(ids[None]).logits[0] / temperature).log_softmax(-1)
        at = torch.from_numpy(np.flatnonzero(mask))
        out.append(table[at - 1, ids[at]])
    return torch.cat(out)


def masks(batch):
    return np.split(batch.loss_mask, np.cumsum(batch.lengths)[:-1])


def test_a_bfloat16_checkpoint_trains_in_float32(make_trainer, tmp_path):
    path = tiny_checkpoint(tmp_path / "model", dtype="bfloat16")
    exported = dict(make_trainer(path).export())
    for name, tensor in hf_model(path, torch.bfloat16).state_dict().items():
        if name != "lm_head.weight":
            assert exported[name].dtype == torch.float32
            assert torch.equal(exported[name].bfloat16(), tensor)


def test_packed_equals_each_sequence_alone(make_trainer):
    batch = random_batch(10)
    packed = log_probs(make_trainer(max_tokens_per_gpu=10_000), batch)
    alone = log_probs(make_trainer(**EACH_ALONE), batch)
    assert np.abs(packed - alone).max() < 1e-5


def test_loss_and_gradients_equal_a_float64_reference(make_trainer, checkpoint):
    batch = random_batch(8, seed=3)
    trainer = make_trainer(
        use_kl_loss=True, kl_loss_coef=0.2, kl_loss_type="k3", entropy_coef=0.05, eps_clip=0.2, eps_clip_high=0.3,
        clip_grad=0.0, lr=1e-6,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    sampled = batch.loss_mask == 1
    old = np.zeros(batch.num_tokens, np.float32)
    old[sampled] = log_probs(trainer, batch)[sampled] + rng.normal(0, 0.3, sampled.sum())
    ref = np.zeros(batch.num_tokens, np.float32)
    ref[sampled] = old[sampled] + rng.normal(0, 0.3, sampled.sum())
    batch = batch.with_columns(old=old, ref=ref)
    metrics = train(trainer, batch)

    model = hf_model(checkpoint, torch.float64)
    lp = hf_log_probs(model, batch)
    ratio = torch.exp(lp - torch.from_numpy(old[sampled]))
    advantage = torch.from_numpy(batch["advantage"][sampled]).double()
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.3) * advantage)
    d = lp - torch.from_numpy(ref[sampled])
    entropies = []
    for tokens, mask in zip(np.split(batch.tokens, np.cumsum(batch.lengths)[:-1]), masks(batch), strict=True):
        table = model(torch.from_numpy(tokens).long()[None]).logits[0].log_softmax(-1)
        entropies.append(-(table.exp() * table).sum(-1)[torch.from_numpy(np.flatnonzero(mask)) - 1])
    loss = (-surrogate + 0.2 * (torch.exp(-d) - 1 + d) - 0.05 * torch.cat(entropies)).mean()
    loss.backward()

    assert metrics["train/loss"] == pytest.approx(loss.item(), rel=1e-5)
    norm = torch.sqrt(sum((p.grad**2).sum() for p in model.parameters()))
    assert metrics["train/grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    theirs = {n: p.grad for n, p in model.named_parameters()}
    for name, parameter in trainer.policy.core.model.named_parameters():
        pairs = trainer.policy.core.conversion.to_hf(name, parameter.main_grad)
        for hf_name, grad in pairs:
            error = (grad.double() - theirs[hf_name]).norm() / theirs[hf_name].norm()
            assert error < 1e-4, hf_name


def test_cutting_into_micro_batches_does_not_matter(make_trainer):
    batch = random_batch(14, seed=5)
    results = []
    for options in ({"max_tokens_per_gpu": 10_000}, {"max_tokens_per_gpu": 70}, EACH_ALONE):
        trainer = make_trainer(**options)
        metrics = train(trainer, batch)
        results.append((metrics, {n: t.clone() for n, t in trainer.export()}))
    assert results[0][0]["train/micro_batches"] < results[1][0]["train/micro_batches"] < 15
    for metrics, weights in results[1:]:
        for key in ("train/loss", "train/grad_norm", "train/logprob_abs_diff_mean", "train/ess"):
            assert metrics[key] == pytest.approx(results[0][0][key], rel=2e-5), key
        for name, tensor in weights.items():
            # Adam's first step is lr * sign where gradients are tiny, so compare against the step.
            assert (tensor - results[0][1][name]).abs().mean() < 1e-2 * 1e-3, name


def test_several_steps_a_rollout_and_the_reference_stays(make_trainer):
    batch = random_batch(12, segments=2)
    trainer = make_trainer(use_kl_loss=True, kl_loss_coef=0.1)
    before = log_probs(trainer, batch)
    first = train(trainer, batch, 3)
    assert first["train/steps"] == 3
    assert trainer.policy.core.steps_done == 3
    assert first["train/sampled_tokens"] == batch.num_sampled
    assert np.abs(log_probs(trainer, batch, "ref") - before).max() == 0
    assert np.abs(log_probs(trainer, batch) - before).max() > 1e-3
    assert train(trainer, batch)["train/kl_loss"] > 0


def test_a_rollout_with_fewer_trajectories_than_steps_is_trained_in_fewer(make_trainer):
    trainer = make_trainer()
    assert train(trainer, random_batch(4, segments=2), 3)["train/steps"] == 2
    assert trainer.policy.core.steps_done == 2


def test_log_probabilities_are_taken_without_dropout(make_trainer):
    trainer, modes = make_trainer(use_kl_loss=True, kl_loss_coef=0.1, use_rollout_logprobs=False), []
    trainer.policy.core.model.register_forward_pre_hook(lambda module, args: modes.append(module.training))
    train(trainer, random_batch(4), 2)
    assert modes == sorted(modes) and set(modes) == {False, True}  # reference and old first, then updates


def test_recomputed_old_log_probabilities(make_trainer):
    batch = random_batch(6)
    metrics = train(make_trainer(use_rollout_logprobs=False), batch)
    assert (metrics["train/clip_fraction"], metrics["train/ppo_kl"]) == (0.0, 0.0)
    assert metrics["train/logprob_abs_diff_mean"] > 0.01
    assert train(make_trainer(use_rollout_logprobs=False), batch, 2)["train/ppo_kl"] != 0.0


def test_training_raises_the_probability_of_what_was_good(make_trainer):
    batch = random_batch(8)
    batch = batch.with_columns(advantage=batch.loss_mask.astype(np.float32))
    trainer = make_trainer(use_rollout_logprobs=False)
    before = log_probs(trainer, batch).sum()
    for _ in range(3):
        train(trainer, batch)
    assert log_probs(trainer, batch).sum() > before + 1


def test_a_bad_gradient_changes_nothing(make_trainer):
    batch = random_batch(6)
    bad = batch["advantage"].copy()
    bad[np.flatnonzero(batch.loss_mask)[0]] = np.inf
    trainer = make_trainer(lr_warmup_steps=4)
    train(trainer, batch)
    before = {n: t.clone() for n, t in trainer.export()}
    metrics = train(trainer, batch.with_columns(advantage=bad))
    assert metrics["train/steps_skipped"] == 1
    assert not np.isfinite(metrics["train/grad_norm"])
    assert all(torch.equal(before[n], t) for n, t in trainer.export())
    after = train(trainer, batch)
    assert after["train/steps_skipped"] == 0
    assert after["train/lr"] == pytest.approx(1e-3 * 2 / 4)


@pytest.mark.parametrize("options", [{}, {"use_distributed_optimizer": True, "advantage_estimator": "ppo"}])
def test_a_batch_that_teaches_nothing_changes_nothing(make_trainer, options):
    """Adam's momentum of the steps before would move the weights, and they would decay."""
    trainer, batch = make_trainer(lr_warmup_steps=4, **options), random_batch(6)
    batch = batch.with_columns(values=0 * batch["old"], returns=batch["old"])
    trainer.update(batch)
    before = {n: t.clone() for n, t in trainer.export()}
    nothing = 0 * batch["advantage"]
    metrics = trainer.update(batch.with_columns(advantage=nothing, returns=nothing), num_steps=2)[0]
    assert (metrics["train/steps_empty"], metrics["train/steps_skipped"], metrics["train/grad_norm"]) == (2, 0, 0)
    assert all(torch.equal(before[n], t) for n, t in trainer.export())
    after = trainer.update(batch)[0]
    assert after["train/steps_empty"] == 0 and after["train/lr"] == pytest.approx(1e-3 * 2 / 4)


def test_a_run_of_bad_gradients_ends(make_trainer):
    batch, trainer = random_batch(4), make_trainer(max_skipped_steps=1, advantage_estimator="ppo")
    nan = np.full(batch.num_tokens, np.nan, np.float32)
    bad = batch.with_columns(values=0 * batch["old"], returns=batch["old"], advantage=nan)
    fine = bad.with_columns(advantage=batch["advantage"])
    assert trainer.update(bad)[0]["train/steps_skipped"] == 1
    assert trainer.update(fine)[0]["train/steps_skipped"] == 0  # it counts in a row
    assert trainer.update(bad)[0]["train/steps_skipped"] == 1
    with pytest.raises(GradientError, match="2 optimizer steps in a row .*--max-skipped-steps 1"):
        trainer.update(bad)
    with pytest.raises(GradientError):
        trainer.update(fine.with_columns(returns=nan), num_steps=3)  # the critic's count too


def test_three_steps_equal_torchs_adamw_with_its_groups_clipping_and_schedule(make_trainer, checkpoint):
    """Gradients by Megatron and by transformers, then two optimizers: decay on matrices alone, clipped by the norm of
    all, moved along a cosine."""
    settings = {"lr": 1e-3, "min_lr": 1e-4, "lr_decay_style": "cosine", "num_rollout": 3, "weight_decay": 0.3}
    trainer = make_trainer(**settings, clip_grad=0.05, adam_beta1=0.8, adam_beta2=0.9)
    model, batch = hf_model(checkpoint, torch.float64), fresh(random_batch(6))
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.3}, {"params": others, "weight_decay": 0.0}], betas=(0.8, 0.9)
    )
    advantage = torch.from_numpy(batch["advantage"][batch.loss_mask == 1]).double()
    for k in range(3):
        metrics = train(trainer, batch)
        optimizer.zero_grad()
        (-advantage * hf_log_probs(model, batch)).mean().backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        for group in optimizer.param_groups:
            group["lr"] = 1e-4 + 9e-4 * (1 + math.cos(math.pi * k / 3)) / 2
        optimizer.step()
        assert norm > 0.05 and metrics["train/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    theirs = model.state_dict()
    for name, tensor in trainer.export():
        # Where a gradient is as small as Adam's epsilon the two may part by a share of a step.
        assert (tensor - theirs[name]).abs().mean() < 1e-2 * 1e-3, name


@pytest.mark.parametrize("style", ["linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 1, 3])
def test_the_learning_rate_has_its_peak_once_and_is_never_at_its_end(style, warmup):
    """Against the formula; the scheduler needs no model."""
    from agentrl.trainer.megatron.optimizer import build_scheduler

    steps, lr, least = 8, 1e-3, 1e-4
    options = OptimizerOptions(lr=lr, min_lr=least, lr_warmup_steps=warmup, lr_decay_style=style, weight_decay=0.1)
    group = {"lr": 0.0}
    scheduler, rates = build_scheduler(SimpleNamespace(param_groups=[group]), options, steps), []
    for _ in range(steps):
        rates.append(group["lr"])
        scheduler.step(1)
    peak = max(warmup, 1)
    for k, rate in enumerate(rates, start=1):
        part = (k - peak) / (steps + 1 - peak)
        left = 1 - part if style == "linear" else (1 + math.cos(math.pi * part)) / 2
        assert rate == pytest.approx(lr * k / warmup if k < peak else least + (lr - least) * left), k
    assert rates[peak - 1] == lr and rates.count(lr) == 1 and rates[-1] > least


DECAYS = {
    "linear": lambda part: 1 - part,
    "cosine": lambda part: (1 + math.cos(math.pi * part)) / 2,
    "exponential": lambda part: 2 * 0.5**part - 1,
    "minus_sqrt": lambda part: 1 - math.sqrt(part),
}


@pytest.mark.parametrize("style", DECAYS)
def test_wsd_stays_at_the_peak_until_its_decay(style):
    rates, _ = scheduled(10, lr_decay_style="WSD", lr_wsd_decay_steps=4, lr_wsd_decay_style=style, lr_warmup_steps=2)
    expected = [0.5e-3, *[1e-3] * 6, *(1e-4 + 9e-4 * DECAYS[style](k / 4) for k in (1, 2, 3))]
    assert rates == pytest.approx(expected)


def test_inverse_square_root_goes_on_from_the_warm_up():
    rates, _ = scheduled(6, lr_decay_style="inverse-square-root", lr_warmup_steps=3, min_lr=7e-4)
    assert rates == pytest.approx([1e-3 / 3, 2e-3 / 3, 1e-3, 1e-3 * (2 / 3) ** 0.5, 1e-3 * (2 / 4) ** 0.5, 7e-4])


@pytest.mark.parametrize(("style", "middle"), [("linear", 0.5), ("cosine", 0.5), ("cosine", None)])
def test_weight_decay_goes_from_its_start_to_its_end(style, middle):
    steps = 5 if middle else 4
    _, decays = scheduled(steps, weight_decay=0.4, start_weight_decay=0.2, weight_decay_incr_style=style)
    parts = [k / (steps - 1) for k in range(steps)]
    share = {"linear": lambda p: p, "cosine": lambda p: (1 - math.cos(math.pi * p)) / 2}[style]
    assert decays == pytest.approx([0.2 + 0.2 * share(p) for p in parts])
    assert scheduled(3, weight_decay=0.4)[1] == [0.4] * 3


def scheduled(steps, **options):
    """Learning rate and weight decay of each optimizer step."""
    from agentrl.trainer.megatron.optimizer import build_scheduler

    group = {"lr": 0.0}
    options = OptimizerOptions(**{"lr": 1e-3, "min_lr": 1e-4, **options})
    scheduler, seen = build_scheduler(SimpleNamespace(param_groups=[group]), options, steps), []
    for _ in range(steps):
        seen.append((group["lr"], group["weight_decay"]))
        scheduler.step(1)
    return [rate for rate, _ in seen], [decay for _, decay in seen]


@pytest.mark.parametrize("options", [{}, {"use_distributed_optimizer": True}, {"dtype": "bf16"}])
def test_resume_is_bit_exact(make_trainer, tmp_path, options):
    options = {"lr_warmup_steps": 3, "lr_decay_style": "cosine", "num_rollout": 9, **options}
    batches = [random_batch(6, seed=i) for i in range(4)]
    straight = make_trainer(**options)
    expected = [train(straight, b) for b in batches]
    weights = {n: t.clone() for n, t in straight.export()}
    first = make_trainer(**options)
    for batch in batches[:2]:
        train(first, batch)
    first.save(tmp_path / "state")
    resumed = make_trainer(**options)
    resumed.load(tmp_path / "state")
    assert resumed.policy.core.steps_done == 2
    for batch, there in zip(batches[2:], expected[2:], strict=True):
        here = train(resumed, batch)
        assert all(here[k] == there[k] for k in there if not k.startswith("time") and "per_s" not in k)
    assert all(torch.equal(weights[n], t) for n, t in resumed.export())


@pytest.mark.parametrize(
    "options",
    [
        {"advantage_estimator": "ppo", "critic_lr": 2e-3},
        {"use_distributed_optimizer": True, "use_kl_loss": True, "kl_loss_coef": 0.1, "ref_update_interval": 1},
        {"dtype": "bf16"},
    ],
)
def test_what_is_saved_for_later_is_of_the_moment_it_was_saved(make_trainer, tmp_path, options):
    trainer, later = make_trainer(**options), Writes(later=True)
    train(trainer, random_batch(6, seed=0))
    trainer.save(tmp_path / "now" / "state")
    trainer.save_hf(tmp_path / "now" / "hf")
    trainer.save(tmp_path / "later" / "state", later)
    trainer.save_hf(tmp_path / "later" / "hf", later)
    assert not [p for p in (tmp_path / "later").rglob("*") if p.is_file()]
    train(trainer, random_batch(6, seed=1))
    torch.rand(3)
    if trainer.policy.reference:
        trainer.refresh_reference()
    later.finish()
    now, then = ({str(p.relative_to(f)): p.read_bytes() for p in f.rglob("*") if p.is_file()} for f in
                 (tmp_path / "now", tmp_path / "later"))  # fmt: skip
    assert sorted(now) == sorted(then) and len(now) > 4
    assert not [name for name in now if now[name] != then[name]]


@pytest.mark.parametrize("left_out", ["save_optim", "load_optim"])
def test_moments_are_optional(make_trainer, tmp_path, left_out):
    options, batch = {"lr_decay_style": "linear", "num_rollout": 4}, random_batch(4)
    first = make_trainer(**options, **{left_out: False})
    for _ in range(2):
        train(first, batch)
    expected = {name: tensor.clone() for name, tensor in first.export()}
    first.save(tmp_path)
    saved = load_file(tmp_path / "policy" / "model-tp0-pp0.safetensors")
    assert {name.split("/")[0] for name in saved} == (
        {"weight"} if left_out == "save_optim" else {"weight", "exp_avg", "exp_avg_sq"}
    )
    second = make_trainer(**options, **{left_out: False})
    second.load(tmp_path)
    assert all(torch.equal(expected[name], tensor) for name, tensor in second.export())
    core = second.policy.core
    assert core._state._steps() == 0 and core.steps_done == 2
    assert train(second, batch)["train/lr"] == pytest.approx(0.5e-3)  # the schedule goes on
    assert core._state._steps() == 1


def test_a_state_of_another_model_is_refused(make_trainer, tmp_path):
    make_trainer().save(tmp_path / "state")
    other = make_trainer(tiny_checkpoint(tmp_path / "wide", hidden_size=32))
    with pytest.raises(CheckpointError, match="another model"):
        other.load(tmp_path / "state")
    (tmp_path / "state" / "policy" / "model-tp0-pp0.safetensors").write_bytes(b"torn")
    with pytest.raises(CheckpointError, match="another checkpoint"):
        other.load(tmp_path / "state")
    with pytest.raises(CheckpointError, match="cannot be read"):
        other.load(tmp_path / "nowhere")


def test_save_hf_loads_with_everything_beside_the_weights(make_trainer, tmp_path):
    path = Path(tiny_checkpoint(tmp_path / "model", dtype="bfloat16"))
    (path / "tokenizer.json").write_text("{}")
    (path / "chat_template.jinja").write_text("{{ messages }}")
    (path / "modeling.py").write_text("raise SystemExit")
    trainer = make_trainer(str(path))
    batch = random_batch(4)
    train(trainer, batch)
    trainer.save_hf(tmp_path / "out")
    files = {p.name for p in (tmp_path / "out").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= files
    assert "modeling.py" not in files
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"
    with torch.no_grad():
        loaded = hf_log_probs(hf_model(tmp_path / "out"), batch).numpy()
    assert np.abs(log_probs(trainer, batch)[batch.loss_mask == 1] - loaded).max() < 1e-4


def test_large_models_are_saved_in_shards(make_trainer, tmp_path, monkeypatch):
    monkeypatch.setattr("agentrl.trainer.megatron.export.SHARD_BYTES", 100_000)
    trainer = make_trainer()
    trainer.save_hf(tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    loaded = hf_model(tmp_path / "out").state_dict()
    assert all(torch.equal(loaded[n], t) for n, t in trainer.export())


def test_megatrons_own_options_reach_megatron(make_trainer):
    given = {"adam_eps": 1e-5, "bias_dropout_fusion": True, "average_in_collective": True, "rotary_base": 10000.0}
    trainer = make_trainer(megatron=given)
    assert trainer.policy.core.optimizer.config.adam_eps == 1e-5
    assert trainer.policy.core.model.config.bias_dropout_fusion
    assert trainer.policy.core.ddp.ddp_config.average_in_collective


FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@pytest.mark.parametrize(
    "options",
    [
        {"recompute_activations": True},
        {"megatron": FULL},
        {"megatron": {"overlap_grad_reduce": True, "bucket_size": 5000}},
    ],
)
def test_memory_and_overlap_options_change_nothing(make_trainer, options):
    batch = random_batch(6)
    expected, metrics = train(make_trainer(), batch), train(make_trainer(**options), batch)
    for key in ("train/loss", "train/grad_norm"):
        assert metrics[key] == pytest.approx(expected[key], rel=1e-6)


def test_recomputing_activations_keeps_fewer_of_them(make_trainer):
    kept = []
    for options in ({}, {"recompute_activations": True}, {"megatron": FULL}):
        trainer, saved = make_trainer(max_tokens_per_gpu=1000, **options), []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t) or t, lambda t: t):
            loss, seen = trainer.policy.loss, []

            def at_the_end(tokens, loss=loss, saved=saved, seen=seen, trainer=trainer):
                weights = {p.untyped_storage().data_ptr() for p in trainer.policy.core.model.parameters()}
                storages = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in saved)}
                seen.append(sum(size for at, size in storages.items() if at not in weights))
                return loss(tokens)

            at_the_end.names, at_the_end.wants_entropy = loss.names, False
            trainer.policy.loss = at_the_end
            train(trainer, random_batch(16, low=40, high=60))
        kept.append(seen[0])
    everything, selective, full = kept
    assert selective < 0.7 * everything and full < 0.5 * selective


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"megatron": {"adam_epz": 1}}, "did you mean 'adam_eps'"),
        ({"megatron": {"calculate_per_token_loss": True}}, "always a mean"),
        ({"megatron": {"layernorm_epsilon": 1e-3}}, "does not agree with the model's rms_norm_eps"),
        ({"megatron": {"hidden_dropout": 0.1}}, "samples without dropout"),
        ({"advantage_estimator": "gripo"}, "Did you mean 'grpo'"),
        ({"megatron": {"recompute_granularity": "full"}}, "needs --recompute-method"),
        ({"megatron": {"apply_rope_fusion": True}}, "needs TransformerEngine"),
        ({"megatron": {"gradient_accumulation_fusion": True}}, "needs CUDA and a kernel of apex or TransformerEngine"),
    ],
)
def test_wrong_options_are_refused(make_trainer, options, text):
    with pytest.raises(ConfigError, match=text):
        make_trainer(**options)


_SOME = st.none() | st.integers(0, 6)


@given(st.integers(1, 12), st.integers(1, 4), _SOME, _SOME, _SOME, _SOME)
def test_layers_that_are_dealt_to_stages_are_those_that_megatron_deals(layers, stages, first, last, chunks, recomputed):
    """What is accepted, Megatron accepts, and every layer runs once, in order."""
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    from agentrl.trainer.megatron import core  # noqa: F401  # Megatron as it is here

    options = {
        "num_layers_in_first_pipeline_stage": first,
        "num_layers_in_last_pipeline_stage": last,
        "virtual_pipeline_model_parallel_size": chunks,
        "recompute_num_layers": recomputed,
    }
    options = {name: value for name, value in options.items() if value is not None}
    if recomputed is not None:
        options |= {"recompute_granularity": "full", "recompute_method": "block"}
    if list(layout_problems(options, ParallelOptions(pipeline_model_parallel_size=stages), layers)):
        return
    config = TransformerConfig(
        num_layers=layers, hidden_size=8, num_attention_heads=1, pipeline_model_parallel_size=stages,
        pipeline_dtype=torch.float32, **options,
    )  # fmt: skip
    parts = [(chunk if chunks else None, stage) for chunk in range(chunks or 1) for stage in range(stages)]
    run = []
    for part in parts:
        offset = get_transformer_layer_offset(config, *part)
        run += range(offset, offset + get_num_layers_to_build(config, *part))
    assert run == list(range(layers))


def test_unusable_checkpoints_are_refused(make_trainer, tmp_path):
    with pytest.raises(CheckpointError, match="config.json"):
        make_trainer(str(tmp_path))
    path = Path(tiny_checkpoint(tmp_path / "model"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "model_type": "gpt2"}))
    with pytest.raises(ConfigError, match="supported: qwen2, qwen3, llama"):
        make_trainer(str(path))


WITH_BIASES = {
    "qwen3 attention": ("qwen3", {"attention_bias": True}, "attention_bias True"),
    "llama attention": ("llama", {"attention_bias": True}, "attention_bias True"),
    "llama mlp": ("llama", {"mlp_bias": True}, "mlp_bias True"),
}


@pytest.mark.parametrize("name", WITH_BIASES)
def test_tensors_that_the_model_does_not_take_are_refused(make_trainer, tmp_path, name):
    """Once by the name in config.json; and, where that does not say it, by the tensors themselves."""
    kind, changes, text = WITH_BIASES[name]
    path = Path(tiny_checkpoint(tmp_path / "model", kind, **changes))
    with pytest.raises(ConfigError, match=text):
        make_trainer(str(path))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k not in changes}))
    with pytest.raises(ConfigError, match=r"tensors in .* are no part of the model.*\.bias"):
        make_trainer(str(path))


def test_a_checkpoint_that_lacks_a_tensor_is_refused(make_trainer, tmp_path):
    path = Path(tiny_checkpoint(tmp_path / "model"))
    weights = load_file(path / "model.safetensors")
    del weights["model.layers.2.mlp.up_proj.weight"]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks 1 of the .* tensors.*layers\.2\.mlp\.up_proj"):
        make_trainer(str(path))


def test_a_tied_head_in_the_file_and_old_rotary_buffers_are_no_extra_tensors(make_trainer, tmp_path):
    path = Path(tiny_checkpoint(tmp_path / "model"))
    weights = load_file(path / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    exported = dict(make_trainer(str(path)).export())
    assert exported.keys() == weights.keys() - {"lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"}


def test_reference_log_probabilities_need_a_reference(make_trainer):
    with pytest.raises(ConfigError, match="no reference"):
        log_probs(make_trainer(), random_batch(2), "ref")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"rms_norm_eps": 1e-5}, r"layernorm_epsilon is 1e-05, the policy's 1e-06"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "the rotary embedding is .*500000"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings is False, the policy's True"),
    ],
)
def test_a_reference_that_is_computed_in_another_way_is_refused(make_trainer, tmp_path, changes, text):
    path = tiny_checkpoint(tmp_path / "other", **changes)
    with pytest.raises(ConfigError, match=f"other is not of the policy's architecture: {text}"):
        make_trainer(use_kl_loss=True, ref_load=path)


def test_the_reference_is_refreshed_saved_and_loaded(make_trainer, tmp_path):
    options = {"use_kl_loss": True, "kl_loss_coef": 0.1, "ref_update_interval": 1}
    trainer, batch = make_trainer(**options), random_batch(6)
    first = log_probs(trainer, batch, "ref")
    train(trainer, batch)
    assert (log_probs(trainer, batch, "ref") == first).all()
    trainer.refresh_reference()
    second = log_probs(trainer, batch, "ref")
    assert (second == log_probs(trainer, batch)).all() and (second != first).any()
    train(trainer, batch)
    now = log_probs(trainer, batch)
    trainer.save(tmp_path)
    again = make_trainer(**options)
    again.load(tmp_path)
    assert (log_probs(again, batch, "ref") == second).all()
    assert (log_probs(again, batch) == now).all() and (now != second).any()
    kept = make_trainer(**{**options, "ref_update_interval": None})
    for folder in (tmp_path, tmp_path / "next"):
        kept.load(folder)
        assert (log_probs(kept, batch, "ref") == second).all(), "a run that refreshes it no more goes on with it"
        kept.save(tmp_path / "next")


def test_a_step_whose_episodes_are_all_masked_moves_nothing(make_trainer):
    trainer, batch = make_trainer(weight_decay=0.0), random_batch(4)
    before = log_probs(trainer, batch)
    report = train(trainer, batch.with_columns(in_loss=np.zeros(batch.num_tokens, np.uint8)))
    assert report["train/grad_norm"] == 0 and report["train/loss"] == 0
    assert (log_probs(trainer, batch) == before).all()


def test_failures_far_from_the_policy_do_not_train_it(make_trainer):
    """Segments of a trajectory lie in several micro-batches, and only the second step's policy has moved away."""
    trainer = make_trainer(use_opsm=True, opsm_delta=1e-3, lr=0.02, max_tokens_per_gpu=64)
    batch = random_batch(8, segments=2, groups=4)
    batch = batch.with_columns(rollout=log_probs(trainer, batch))
    batch = batch.with_columns(old=batch["rollout"])
    report, kept = trainer.update(batch, num_steps=2, keep=True)
    now = batch.with_columns(current=kept["current"])
    masked = trainer.algorithm.in_step(now)["opsm_masked"] == 1
    first, second = (batch.trajectory < 2), (batch.trajectory >= 2)
    assert not masked[first].any() and masked[second].any()
    shares = [masked[half & (batch.loss_mask == 1)].mean() for half in (first, second)]
    assert report["train/opsm_masked"] == pytest.approx(np.mean(shares), rel=1e-4)
    far = batch.with_columns(rollout=batch["rollout"] + batch.loss_mask, advantage=-np.abs(batch["advantage"]))
    assert trainer.update(far)[0]["train/grad_norm"] == 0, "all are failures that it would not sample"


@pytest.mark.parametrize("name", ALGORITHMS)
def test_each_estimator_raises_the_probability_of_what_earned_more(make_trainer, name):
    """Infer, credit and update as the loop does them, three rollouts of the same episodes."""
    changes = {"eps_clip": 3e-4, "eps_clip_high": 4e-4} if name == "gspo" else {}
    trainer = make_trainer(
        advantage_estimator=name, use_rollout_logprobs=False, use_tis=True, tis_level="geometric", loss_scale_factor=40,
        lr=3e-4, **changes,
    )  # fmt: skip
    batch = random_batch(12)
    before = log_probs(trainer, batch)
    batch = fresh(batch).with_columns(rollout=before)
    for _ in range(3):
        seen = batch.with_columns(**trainer.infer(batch, trainer.algorithm.infers(1)))
        seen = seen.with_columns(**trainer.algorithm.prepare(seen))
        report, _ = trainer.update(seen)
        assert math.isfinite(report["train/loss"]) and report["train/grad_norm"] > 0
    change = batch.means(log_probs(trainer, batch) - before)
    means = np.bincount(batch.group_of, batch.rewards) / np.bincount(batch.group_of)
    better = batch.rewards - means[batch.group_of]
    assert change[better > 0].mean() > change[better < 0].mean() + 0.01
