"""The critic on one rank, in this process: its values and loss against transformers and float64, and its state."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from agentrl.algorithms import load_algorithm
from agentrl.config.schema import AlgorithmOptions
from agentrl.errors import ConfigError
from agentrl.trainer.losses import value_loss
from tests.trainer.samples import log_probs, random_batch, tiny_checkpoint, train

PPO = {"advantage_estimator": "ppo"}


@pytest.fixture(scope="module")
def valued(tmp_path_factory):
    """A checkpoint of another size with a head that gives one number, and no output layer."""
    path = tmp_path_factory.mktemp("valued")
    tiny_checkpoint(path, hidden_size=48, num_hidden_layers=2)
    tensors = load_file(path / "model.safetensors")
    torch.manual_seed(1)
    tensors = {name: t for name, t in tensors.items() if name != "lm_head.weight"}
    save_file(tensors | {"score.weight": torch.randn(1, 48) * 0.3}, path / "model.safetensors", {"format": "pt"})
    return str(path)


def hf_values(path, batch):
    """float64[N] with gradient, each sequence alone, and the parameters by name."""
    model = transformers.AutoModel.from_pretrained(path, dtype=torch.float64)
    score = load_file(f"{path}/model.safetensors")["score.weight"].double().requires_grad_()
    values = []
    for start, end in zip(batch.offsets, batch.offsets[1:], strict=False):
        states = model(torch.from_numpy(batch.tokens[start:end]).long()[None]).last_hidden_state[0]
        values.append((states @ score.t()).squeeze(1)[np.flatnonzero(batch.loss_mask[start:end]) - 1])
    return torch.cat(values), [*model.parameters(), score]


def test_values_and_loss_equal_a_float64_reference(make_trainer, valued):
    batch = random_batch(8, seed=3)
    trainer = make_trainer(**PPO, critic_load=valued, value_clip=0.2, clip_grad=0.0, critic_lr=1e-6)
    values, parameters = hf_values(valued, batch)
    sampled = batch.loss_mask == 1
    ours = log_probs(trainer, batch, "values")
    assert np.abs(ours[sampled] - values.detach().numpy()).max() < 1e-5 and not ours[~sampled].any()

    rng = np.random.default_rng(0)
    old, returns = (np.where(sampled, ours + rng.normal(0, 0.4, len(ours)), 0).astype(np.float32) for _ in range(2))
    metrics, _ = trainer.update(batch.with_columns(values=old, returns=returns))
    v, r = (torch.from_numpy(column[sampled]).double() for column in (old, returns))
    clipped = torch.clamp(values, v - 0.2, v + 0.2)
    loss = 0.5 * torch.maximum((values - r) ** 2, (clipped - r) ** 2).mean()
    loss.backward()
    assert metrics["critic/value_loss"] == pytest.approx(loss.item(), rel=1e-5)
    norm = torch.sqrt(sum((p.grad**2).sum() for p in parameters))
    assert metrics["critic/grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    expected = ((clipped - r) ** 2 > (values - r) ** 2).double().mean()
    assert metrics["critic/value_clip_fraction"] == pytest.approx(expected.item(), abs=1e-6)
    assert metrics["critic/explained_variance"] == pytest.approx(1 - np.var((r - v).numpy()) / np.var(r.numpy()))


def test_a_clipped_value_has_no_gradient_and_zero_switches_clipping_off():
    values = torch.tensor([1.0, 1.0], requires_grad=True)
    old, returns = torch.tensor([0.0, 0.0]), torch.tensor([0.9, 2.0])
    value_loss(values, old, returns, 0.2).values.sum().backward()
    assert values.grad.tolist() == [0.0, 0.0]  # it moved further than 0.2, and would be worse had it stopped there
    values.grad = None
    value_loss(values, old, returns, 0.0).values.sum().backward()
    assert values.grad.tolist() == pytest.approx([0.1, -1.0])


def test_a_critic_of_the_policys_model_starts_at_zero_and_learns_returns(make_trainer):
    trainer, batch = make_trainer(**PPO, value_clip=0.0, lr=1e-9, critic_lr=3e-3), random_batch(8)
    assert not log_probs(trainer, batch, "values").any()
    returns = batch.spread(np.arange(8.0) / 8)
    losses = []
    for _ in range(25):
        values = log_probs(trainer, batch, "values")
        metrics, _ = trainer.update(batch.with_columns(values=values, returns=returns))
        losses.append((metrics["critic/value_loss"], metrics["critic/explained_variance"]))
    assert losses[-1][0] < 0.1 * losses[0][0]
    assert losses[0][1] == 0 and losses[-1][1] > 0.8


def test_a_step_whose_episodes_are_all_masked_has_no_loss(make_trainer):
    trainer, batch = make_trainer(**PPO), random_batch(4)
    report = train(trainer, batch.with_columns(in_loss=np.zeros(batch.num_tokens, np.uint8)))
    assert report["critic/value_loss"] == report["critic/value_clip_fraction"] == report["critic/grad_norm"] == 0


def test_no_other_algorithm_has_a_critic(make_trainer):
    trainer = make_trainer()
    assert trainer.critic is None and list(trainer.parts) == ["policy"]
    with pytest.raises(ConfigError, match="no model computes values"):
        trainer.infer(random_batch(1), ["values"])


def test_first_rollouts_can_train_the_critic_alone(make_trainer):
    options = {"num_critic_only_steps": 1, "num_rollout": 3, "lr_decay_style": "linear"}
    trainer, batch = make_trainer(**PPO, **options), random_batch(4)
    before = {name: tensor.clone() for name, tensor in trainer.export()}
    batch = batch.with_columns(values=log_probs(trainer, batch, "values"), returns=batch["advantage"])
    metrics, kept = trainer.update(batch, critic_only=True)
    assert kept == {} and "critic/value_loss" in metrics and not any(name.startswith("train/") for name in metrics)
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.export())
    # The schedules count the steps of each: two for the policy, three for the critic.
    rates = [trainer.update(batch)[0] for _ in range(2)]
    assert [r["train/lr"] for r in rates] == pytest.approx([1e-3, 0.5e-3])
    assert [r["critic/lr"] for r in rates] == pytest.approx([2e-3 / 3, 1e-3 / 3])


def test_cutting_into_micro_batches_does_not_matter(make_trainer, valued):
    batch, results = random_batch(10, seed=5), []
    for tokens in (10_000, 70):
        trainer = make_trainer(**PPO, critic_load=valued, max_tokens_per_gpu=tokens)
        metrics = train(trainer, batch)
        results.append((metrics, log_probs(trainer, batch, "values")))
    (one, values), (other, again) = results
    for name in ("critic/value_loss", "critic/grad_norm", "critic/explained_variance"):
        assert one[name] == pytest.approx(other[name], rel=1e-4), name
    assert np.abs(values - again).max() < 1e-4


@pytest.mark.parametrize("options", [{}, {"use_distributed_optimizer": True, "dtype": "bf16"}])
def test_resume_is_bit_exact(make_trainer, tmp_path, options):
    options = {**PPO, **options, "lr_decay_style": "linear", "num_rollout": 4}
    whole, batches = make_trainer(**options), [random_batch(6, seed=n) for n in range(4)]
    expected = [train(whole, batch, 2) for batch in batches]
    values = log_probs(whole, batches[0], "values")
    first = make_trainer(**options)
    for batch in batches[:2]:
        train(first, batch, 2)
    first.save(tmp_path)
    first.save_hf(tmp_path / "hf")
    assert not any("score" in name or "value" in name for name in load_file(tmp_path / "hf" / "model.safetensors"))
    second = make_trainer(**options)
    second.load(tmp_path)
    for batch, there in zip(batches[2:], expected[2:], strict=True):
        here = train(second, batch, 2)
        assert {n: v for n, v in here.items() if "time" not in n and "_per_s" not in n} == {
            n: v for n, v in there.items() if "time" not in n and "_per_s" not in n
        }
    assert np.array_equal(log_probs(second, batches[0], "values"), values)


def test_the_step_of_ppo_infers_values_and_hands_returns_on(make_trainer):
    trainer, batch = make_trainer(**PPO, rollout_temperature=0.9), random_batch(6)
    algorithm = load_algorithm(AlgorithmOptions(**PPO))
    assert algorithm.infers(1) == ("values",)
    inferred = trainer.infer(batch, algorithm.infers(1))
    given = algorithm.prepare(batch.with_columns(**inferred))
    assert sorted(given) == ["advantage", "old", "returns"]
    metrics, _ = trainer.update(batch.with_columns(**inferred, **given))
    assert metrics["critic/value_loss"] > 0 and metrics["train/grad_norm"] > 0
