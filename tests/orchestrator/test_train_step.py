"""One step of the loop on a real trainer, without Ray's processes: infer, credit, update, and what is handed back."""

from __future__ import annotations

import logging
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from agentrl.algorithms import TrainBatch, load_algorithm
from agentrl.config.schema import TrainerOptions
from agentrl.orchestrator.handles import TrainerHandle
from agentrl.orchestrator.loop import train
from agentrl.processes.pulse import WORK
from agentrl.trainer.ranks import TrainActor
from tests.trainer.conftest import checkpoint  # noqa: F401
from tests.trainer.samples import QUIET, fresh, random_batch


class Rank:
    """An actor of this process: its methods have ``.remote``, and what they return is awaited."""

    def __init__(self, actor: TrainActor):
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any, **kwargs: Any) -> Any:
            return getattr(self._actor, name)(*args, **kwargs)

        return SimpleNamespace(remote=call, options=lambda **how: SimpleNamespace(remote=call))


class InProcess(TrainerHandle):
    async def fetch(self, batch: list[Any]) -> TrainBatch:
        return batch[0]


async def test_credit_is_given_between_what_is_inferred_and_the_update(
    checkpoint: str,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import ray

    monkeypatch.setattr(ray, "put", lambda value: value)
    marked: list[str] = []
    monkeypatch.setattr(WORK, "mark", lambda: marked.append(WORK.pulse(60.0).at))
    options = TrainerOptions(lr=1e-3, kl_coef=0.1, use_kl_loss=True, use_rollout_logprobs=False, threads=1, **QUIET)
    actor, batch = TrainActor(0, 1, checkpoint, options), fresh(random_batch(8))
    try:
        actor.start(actor.meeting_point())
        trainer = InProcess([Rank(actor)], num_steps=2, deadline=100.0)
        metrics, columns = await train([batch], load_algorithm(options), trainer, version=1, keep=True)
        assert metrics["train/steps"] == 2 and metrics["time/log_probs"] > 0
        assert metrics["rollout/zero_variance"] < 1
        assert sorted(columns) == ["advantage", "current", "old", "ratio", "ref"]
        sampled = batch.loss_mask == 1
        assert np.allclose(columns["old"], columns["ref"]) and (columns["old"][sampled] < 0).all()
        ratio = np.exp(columns["current"] - columns["old"])
        assert np.allclose(columns["ratio"][sampled], ratio[sampled], rtol=1e-5)
        # Each micro-batch is progress, for the watch that looks for a rank that hangs.
        assert marked.count("the training step") >= 2 and "the log-probabilities" in marked
        _, columns = await train([batch], load_algorithm(options), trainer, version=1, keep=False)
        assert sorted(columns) == ["advantage"]
    finally:
        actor.close()


async def test_only_tokens_of_older_weights_are_corrected_and_may_be_masked(
    checkpoint: str,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An asynchronous batch: the first tokens of each episode were sampled before the last update, the rest after."""
    import ray

    monkeypatch.setattr(ray, "put", lambda value: value)
    options = TrainerOptions(lr=1e-2, use_rollout_logprobs=False, use_tis=True, threads=1, **QUIET)
    algorithm, batch = load_algorithm(options), fresh(random_batch(8))
    actor, sampled = TrainActor(0, 1, checkpoint, options), batch.loss_mask == 1
    try:
        actor.start(actor.meeting_point())
        trainer = InProcess([Rank(actor)], num_steps=1, deadline=100.0)
        before = (await trainer.infer([batch], ["old"]))["old"]
        await train([batch], algorithm, trainer, version=1, keep=False)
        now = (await trainer.infer([batch], ["old"]))["old"]
        older = batch.from_here(np.ones(batch.num_tokens)) > batch.spread(batch.sums(np.ones(batch.num_tokens)) / 2)
        versions = np.where(sampled, np.where(older, 1, 2), -1).astype(np.int32)
        mixed = batch.with_columns(rollout=np.where(older, before, now).astype(np.float32), versions=versions)

        metrics, columns = await train([mixed], algorithm, trainer, version=2, keep=True, oldest=0)
        weight, old = columns["correction"], older & sampled
        assert np.allclose(weight[~older & sampled], 1.0, atol=1e-4)
        assert np.abs(weight[old] - 1).min() > 0 and np.abs(weight[old] - 1).mean() > 1e-3
        assert metrics["train/rollout_kl/age_0"] < 1e-6 < metrics["train/rollout_kl/age_1"]
        assert metrics["train/sampled_tokens/age_1"] == old.sum()
        assert metrics["train/offpolicy_masked"] == pytest.approx(old.sum() / sampled.sum())
        metrics, _ = await train([mixed], algorithm, trainer, version=9, keep=True, oldest=0)
        assert metrics["train/steps_empty"] == 1 and metrics["train/offpolicy_masked"] == 1
    finally:
        actor.close()


def test_the_pulse_of_a_rank_tells_how_long_a_collective_has_not_ended(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()
    actor = TrainActor(1, 2, "model", TrainerOptions())
    actor._trainer = SimpleNamespace(infer=lambda batch, names: ended.wait(60))  # type: ignore[assignment]
    monkeypatch.setattr(logging.getLogger("agentrl"), "propagate", True)  # the actor told it to write to a file alone
    assert actor.pulse(0.0, 60.0).stalled == 0.0
    at_work = threading.Thread(target=actor.infer, args=(None, ["old"]))
    at_work.start()
    try:
        while not (pulse := actor.pulse(0.01, 0.1)).stalled > 0.1:
            pass
        assert pulse.at == "the log-probabilities" and "infer" in caplog.text
    finally:
        ended.set()
        at_work.join()
