"""TP, PP, DP and sequence parallelism on two processes against one."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.trainer.ranks import LAYOUTS, OPTIONS, RELOADS, measure, run
from tests.trainer.samples import join, listen, random_batch, train

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("layouts")


@pytest.fixture(scope="module")
def results(checkpoint, out):
    import os

    import torch.multiprocessing as mp

    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        mp.spawn(run, args=({name: listen() for name in [*LAYOUTS, *RELOADS]}, checkpoint, str(out)), nprocs=2)
    finally:
        os.environ.pop("OMP_NUM_THREADS")
        if before is not None:
            os.environ["OMP_NUM_THREADS"] = before
    return json.loads((out / "results.json").read_text())


@pytest.fixture(scope="module")
def alone(checkpoint, out):
    from agentrl.config.schema import TrainerOptions

    trainer = join(0, 1, listen(), checkpoint, TrainerOptions(**OPTIONS))
    folder = out / "alone"
    folder.mkdir()
    result = measure(trainer, folder, load_file(f"{checkpoint}/model.safetensors"))
    trainer.close()
    return result


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_changes_nothing(results, alone, out, name):
    assert results[name]["export_exact"]
    for here, there in zip(results[name]["steps"], alone["steps"], strict=True):
        for key, value in there.items():
            assert here[key] == pytest.approx(value, rel=1e-4, abs=1e-6), key
    values, expected = (np.load(out / n / "log_probs.npy") for n in (name, "alone"))
    assert np.abs(values - expected).max() < 1e-5
    weights, expected = (load_file(out / n / "hf" / "model.safetensors") for n in (name, "alone"))
    for key, tensor in expected.items():
        assert (weights[key] - tensor).abs().mean() < 1e-2 * OPTIONS["lr"], key


@pytest.mark.parametrize("key", RELOADS)
def test_state_saved_at_one_layout_loads_at_another(results, key):
    assert results[key]["exact"]


@pytest.mark.parametrize("name", ["tp2 sp", "pp2", "dp2 dist"])
def test_state_of_two_ranks_loads_at_one(results, make_trainer, out, name):
    trainer = make_trainer(**OPTIONS)
    trainer.load(out / name / "state")
    saved = load_file(out / name / "hf" / "model.safetensors")
    assert all(torch.equal(saved[n], t) for n, t in trainer.export())
    assert trainer.policy.core.steps_done == 4
    loss = train(trainer, random_batch(12))["train/loss"]
    for key, result in results.items():
        if key.startswith(f"{name} to"):
            assert loss == pytest.approx(result["loss"], rel=1e-4)
