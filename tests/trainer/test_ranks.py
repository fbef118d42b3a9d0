"""The actor around the trainer: alone in this process, and as Ray actors."""

from __future__ import annotations

import asyncio

import pytest

from agentrl.config import load_config
from agentrl.config.schema import TrainerOptions
from agentrl.errors import AgentRLError, CheckpointError, StorageError
from agentrl.orchestrator.engine_service import RankSender
from agentrl.orchestrator.handles import TrainerHandle, create_ranks
from agentrl.trainer.ranks import TrainActor
from tests.trainer.samples import QUIET, random_batch

# No engine sampled the random batch: its log-probabilities agree with nobody's.
FLAGS = ("--env", "search", "--lr", "1e-3", "--threads", "1", "--logprob-abs-diff-stop", "0")


@pytest.fixture
def actor(checkpoint, tmp_path):
    publishing = {"bucket_bytes": 50_000, "folder": tmp_path / "published"}
    actor = TrainActor(0, 1, checkpoint, TrainerOptions(lr=1e-3, **QUIET), publishing=publishing)
    yield actor
    actor.close()


def test_one_rank_trains_saves_and_walks_its_weights(actor, checkpoint, tmp_path):
    actor.start(actor.meeting_point())
    assert actor.ready()
    batch = random_batch(6)
    metrics, kept = actor.update(batch, {}, num_steps=2, keep=True)
    assert metrics["train/steps"] == 2 and {v.shape for v in kept.values()} == {(batch.num_tokens,)}
    assert actor.infer(batch, ["old"])["old"].shape == (batch.num_tokens,)
    actor.save(str(tmp_path / "state"))
    actor.load(str(tmp_path / "state"))
    actor.save_hf(str(tmp_path / "hf"))
    actor.save(str(tmp_path / "later"), later=True)
    actor.write()
    actor.load(str(tmp_path / "later"))
    snapshot = actor.publish(2)
    assert [name for bucket in snapshot.buckets for name in bucket.names] == [
        n for n, _ in actor._trainer.policy.core.export()
    ]
    assert len(snapshot.buckets) > 1 and snapshot.is_there()
    assert actor.update(batch, {})[0]["train/steps"] == 1
    assert actor.publish(3).digest != snapshot.digest and not snapshot.is_there()


def test_errors_are_those_of_the_start(tmp_path, actor):
    with pytest.raises(AgentRLError, match="before it was started"):
        actor.ready()
    broken = TrainActor(0, 1, str(tmp_path), TrainerOptions())
    with pytest.raises(CheckpointError):
        broken.start(broken.meeting_point())
    with pytest.raises(CheckpointError, match="config.json"):
        broken.ready()
    with pytest.raises(AgentRLError, match="asked for 'listen' before it published any weights"):
        actor.send("listen")


async def written_beside_an_update(trainer: TrainerHandle, batch, folder) -> bool:
    """Save, then write and train at once; whether all is there, and a file that cannot be written has its sentence."""
    await trainer.save(folder / "state", later=True)
    await trainer.save_hf(folder / "hf", later=True)
    await asyncio.gather(trainer.write(), trainer.update([batch], {}))
    (folder / "a file").touch()
    await trainer.save_hf(folder / "a file" / "hf", later=True)
    with pytest.raises(StorageError, match="cannot be written"):
        await trainer.write()
    return (folder / "hf" / "model.safetensors").is_file() and len(list((folder / "state").rglob("random-*"))) == 2


@pytest.mark.slow
def test_two_ray_actors_form_a_world(checkpoint, tmp_path):
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        ranks = create_ranks(
            load_config(FLAGS), checkpoint, [{"num_cpus": 1}] * 2,
            weights_dir=str(tmp_path), log_dir=tmp_path,
        )  # fmt: skip
        asyncio.run(TrainerHandle(ranks, num_steps=1, deadline=150).begin())
        assert ray.get([r.ready.remote() for r in ranks], timeout=150) == [True, True]
        batch = ray.put(random_batch(8))
        results = ray.get([r.update.remote(batch, {}, keep=True) for r in ranks], timeout=60)
        metrics = [m for m, _ in results]
        assert [sorted(kept) for _, kept in results] == [["current", "ratio"], []]
        for key, value in metrics[0].items():
            assert metrics[1][key] == value or key.startswith("time/") or key.endswith("per_s")
        assert metrics[0]["train/sampled_tokens"] == random_batch(8).num_sampled
        snapshot, nothing = ray.get([r.publish.remote(1) for r in ranks], timeout=60)
        assert sum(len(bucket.names) for bucket in snapshot.buckets) == 46 and nothing is None
        busy = [r.update.remote(batch, {}) for r in ranks]
        assert asyncio.run(RankSender(ranks[0]).listen())[1] > 0, "beside what it trains"
        ray.get(busy, timeout=60)
        trainer = TrainerHandle(ranks, num_steps=1, deadline=60)
        assert asyncio.run(written_beside_an_update(trainer, batch, tmp_path))
        assert (tmp_path / "trainer-1.log").exists()
    finally:
        ray.shutdown()
