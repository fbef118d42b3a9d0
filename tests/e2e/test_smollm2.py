"""SmolLM2 on the real stack: a real vocabulary, grouped queries, tied embeddings, fp32, through ``agentrl train``."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from agentrl.data.store import TrajectoryStore
from agentrl.demo import smollm2
from agentrl.errors import InfraError

pytestmark = [pytest.mark.heavy, pytest.mark.slow, pytest.mark.timeout(900)]

CONFIG = Path(__file__).parents[2] / "envs_examples" / "smollm2" / "guess.toml"
SMALL = ["--num-rollout", "2", "--rollout-batch-size", "2", "--n-samples-per-prompt", "4", "--eval-tasks", "4",
         "--eval-interval", "2", "--save-interval", "2"]  # fmt: skip


@pytest.fixture(scope="module")
def model() -> Path:
    try:
        return smollm2.fetch()
    except InfraError as error:
        pytest.skip(str(error))


def test_two_steps_train_what_the_engine_sampled(model, start, tmp_path):
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    run, trained = tmp_path / "run", tmp_path / "trained"
    command = start(
        "train", "--config", str(CONFIG), "--hf-checkpoint", str(model), *SMALL, "--save-hf", str(trained),
        "--output-dir", str(run),
    )  # fmt: skip
    assert command.wait(800) == 0, command.text[-3000:]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "train/loss" in line]
    assert [line["step"] for line in steps] == [1, 2]
    assert all(line["train/logprob_abs_diff_mean"] < 2e-5 for line in steps)
    assert all(line["sync/bytes"] > 530e6 and line["sync/verified"] > 0 for line in steps)
    assert [line["step"] for line in lines if "eval/guess/success" in line] == [0, 2]

    before, after = (load_file(folder / "model.safetensors") for folder in (model, trained))
    assert set(before) == set(after)
    if any(line["rollout/zero_variance"] < 1 for line in steps):
        assert all((before[name] != after[name]).any() for name in before if name.endswith("_proj.weight"))

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64).eval()
    differences = []
    for trajectory in TrajectoryStore(run / "trajectories").read("train", step=0):
        for segment in trajectory.segments:
            tokens, mask = torch.from_numpy(np.asarray(segment.tokens)).long(), np.asarray(segment.loss_mask) == 1
            with torch.no_grad():
                table = reference(tokens[None]).logits[0, :-1].log_softmax(-1)
            exact = table.gather(1, tokens[1:, None])[:, 0].numpy()
            differences.append((np.asarray(segment.logprobs)[1:] - exact)[mask[1:]])
    assert np.abs(np.concatenate(differences)).mean() < 3e-5
    assert command.left_behind() == []
