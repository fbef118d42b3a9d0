"""A real engine plays a family's model, and gets its weights from the trainer."""

from __future__ import annotations

import aiohttp
import numpy as np
import pytest

from agentrl.engines.control import EngineControl
from agentrl.engines.engine import EngineProcess, EngineSpec
from agentrl.types import Segment, Trajectory
from agentrl.weights.publisher import Publisher
from agentrl.weights.sender import BroadcastSender, LocalSender
from agentrl.weights.sync import WeightSync
from agentrl.weights.transports.broadcast import Broadcast
from agentrl.weights.transports.files import Files
from tests.trainer.samples import TASK, VOCAB, batch_of, log_probs, random_batch, tiny_checkpoint, train

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(400)]


async def sampled(engine: EngineProcess, seed: int):
    """A batch of what the engine samples, with its log-probabilities."""
    rng, trajectories = np.random.default_rng(seed), []
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {engine.api_key}"}) as session:
        for n in range(4):
            prompt = rng.integers(0, VOCAB, 10 + 7 * n).tolist()
            params = {"max_new_tokens": 24, "temperature": 1.0, "ignore_eos": True}
            body = {"input_ids": prompt, "sampling_params": params, "return_logprob": True}
            timeout = aiohttp.ClientTimeout(total=120)
            async with session.post(engine.url + "/generate", json=body, timeout=timeout) as answer:
                triples = (await answer.json())["meta_info"]["output_token_logprobs"]
            mask = np.repeat([0, 1], [len(prompt), len(triples)]).astype(np.uint8)
            values = np.array([0.0] * len(prompt) + [t[0] for t in triples], np.float32)
            tokens = np.array(prompt + [t[1] for t in triples], np.int32)
            segment = Segment(tokens, mask, values, np.where(mask, 1, -1).astype(np.int32), len(prompt))
            trajectories.append(Trajectory(f"t{n}", "g", TASK, [segment], [], reward=0.0))
    return batch_of(trajectories)


@pytest.mark.parametrize("kind", ["glm4", "mistral"])
async def test_an_engine_plays_what_is_trained(make_trainer, tmp_path, kind):
    path = tiny_checkpoint(tmp_path / "model", kind, tie_word_embeddings=False, sliding_window=None)
    trainer = make_trainer(path)
    engine = EngineProcess(EngineSpec(path, max_total_tokens=4096, skip_tokenizer=True), log_dir=tmp_path)
    engine.start(300)
    publisher = Publisher(trainer.export, tmp_path / "weights", bucket_bytes=1 << 20)
    control = EngineControl(engine.url, engine.api_key)
    sync = WeightSync(Broadcast(LocalSender(BroadcastSender(publisher))), restore=Files())
    try:
        batch = await sampled(engine, 0)
        before = log_probs(trainer, batch)
        assert np.abs(before - batch["rollout"]).max() < 1e-4
        for version in (1, 2):
            train(trainer, random_batch(8, seed=version))
            sync.snapshot = publisher.publish(version)
            await sync.update([control])
            later = await sampled(engine, version)
            assert np.abs(log_probs(trainer, later) - later["rollout"]).max() < 1e-4
        assert np.abs(log_probs(trainer, batch) - before).max() > 0.01
    finally:
        await sync.close()
        await control.close()
        publisher.remove()
        engine.stop()
