"""An algorithm of one's own, by the path of its file: credit, a sequence-level ratio, a loss term, a correction."""

from __future__ import annotations

import numpy as np
import pytest

from agentrl.algorithms import load_algorithm
from agentrl.config.schema import AlgorithmOptions
from agentrl.errors import ConfigError
from tests.trainer.samples import QUIET, fresh, log_probs, random_batch

SOURCE = '''
import numpy as np
from agentrl.algorithms import Algorithm


class LeaveOneOut(Algorithm):
    """RLOO's credit with GSPO's ratio."""

    name = "leave one out"
    compares = True
    sequence_ratio = True

    def credit(self, batch):
        rewards, group = self.rewards(batch), batch.group_of
        total, count = np.bincount(group, rewards)[group], np.bincount(group)[group]
        return batch.spread(rewards - (total - rewards) / (count - 1))


class Cloning(LeaveOneOut):
    """A term of its own, and a mask."""

    sequence_ratio = False
    terms = ("likelihood",)

    def likelihood(self, tokens, options):
        from agentrl.trainer.losses import Term

        return Term("nll", -tokens.logprobs * (tokens["advantage"] > 0))

    def correction(self, batch):
        return batch["old"] - batch["rollout"] < 1


class ByAge(Cloning):
    """A term of columns that only some batches have."""

    def prepare(self, batch):
        return super().prepare(batch) | {"difficulty": np.ones(batch.num_tokens, np.float32)}

    def likelihood(self, tokens, options):
        from agentrl.trainer.losses import Term

        more = {"known": tokens["ref"]} if "ref" in tokens.columns else {}
        return Term("nll", -tokens.logprobs * tokens["difficulty"], metrics=more)


class Flat(Cloning):
    def credit(self, batch):
        return self.rewards(batch)
'''


@pytest.fixture
def spec(tmp_path):
    (tmp_path / "mine.py").write_text(SOURCE)
    return f"{tmp_path}/mine.py:{{}}".format


def step(trainer, batch):
    """One step of the loop, without Ray."""
    names = trainer.algorithm.infers(batch.steps(1))
    batch = batch.with_columns(**trainer.infer(batch, names))
    return trainer.update(batch.with_columns(**trainer.algorithm.prepare(batch)), keep=True)


def test_a_trajectorys_ratio_is_exact_over_segments_in_different_micro_batches(make_trainer, spec):
    batch = random_batch(12, segments=2)
    rng = np.random.default_rng(1)
    kept, weights = [], []
    for cut in ({"max_tokens_per_gpu": 10_000}, {"use_dynamic_batch_size": False, "micro_batch_size": 1}):
        trainer = make_trainer(advantage_estimator=spec("LeaveOneOut"), **cut, **QUIET)
        if not kept:  # near enough to the model's own that few ratios are clipped
            noise = rng.normal(0.05, 0.1, batch.num_tokens).astype(np.float32)
            batch = batch.with_columns(rollout=(log_probs(trainer, batch) + noise) * batch.loss_mask)
        metrics, columns = step(trainer, fresh(batch))
        assert metrics["train/grad_norm"] > 0
        kept.append(columns | {"pg_loss": metrics["train/pg_loss"]})
        weights.append({name: tensor.clone() for name, tensor in trainer.export()})
    expected = np.exp(batch.means(kept[0]["current"] - batch["rollout"]))
    for columns in kept:
        ratios = columns["ratio"][batch.loss_mask == 1]
        assert np.abs(ratios - batch.spread(expected)[batch.loss_mask == 1]).max() < 1e-5
    assert kept[0]["pg_loss"] == pytest.approx(kept[1]["pg_loss"], rel=1e-5)
    for name, tensor in weights[0].items():
        assert (tensor - weights[1][name]).abs().mean() < 1e-2 * 1e-3, name


def test_a_term_and_a_correction_of_ones_own(make_trainer, spec):
    trainer = make_trainer(advantage_estimator=spec("Cloning"), **QUIET)
    batch = random_batch(9)
    before = log_probs(trainer, batch)
    metrics, _ = step(trainer, fresh(batch))
    columns = trainer.algorithm.prepare(fresh(batch))
    good = columns["advantage"] > 0
    assert columns["correction"].sum() == batch.num_sampled
    assert metrics["train/nll"] == pytest.approx(-before[good].sum() / batch.num_sampled)
    assert metrics["train/loss"] == pytest.approx(metrics["train/nll"])
    assert log_probs(trainer, batch)[good].sum() > before[good].sum()


def test_a_term_may_read_columns_of_ones_own_and_look_whether_one_is_there(make_trainer, spec):
    trainer, batch = make_trainer(advantage_estimator=spec("ByAge"), **QUIET), random_batch(9)
    before = log_probs(trainer, batch)
    metrics, _ = step(trainer, fresh(batch))
    assert metrics["train/nll"] == pytest.approx(-before.sum() / batch.num_sampled) and "train/known" not in metrics


def test_what_is_no_algorithm_is_refused(spec):
    for given, text in (
        ("gripo", "expected one of grpo, dr_grpo.*Did you mean 'grpo'"),
        (spec("LeaveOneOff"), "Did you mean 'LeaveOneOut'"),
        (spec("np"), "expected a subclass of agentrl.algorithms.Algorithm"),
    ):
        with pytest.raises(ConfigError, match=text):
            load_algorithm(AlgorithmOptions(advantage_estimator=given))
    flat = load_algorithm(AlgorithmOptions(advantage_estimator=spec("Flat")))
    with pytest.raises(ConfigError, match=r"its advantage has shape \(9,\), expected one number a token.*spread"):
        flat.prepare(fresh(random_batch(9)))
