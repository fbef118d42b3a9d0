"""Options of supervised fine-tuning: what it needs, what it sets by itself, what has no effect with it."""

from __future__ import annotations

import pytest

from agentrl.config import load_config
from agentrl.errors import ConfigError


@pytest.fixture
def data(tmp_path):
    (tmp_path / "chats.jsonl").write_text("{}\n")
    (tmp_path / "run" / "trajectories").mkdir(parents=True)
    return tmp_path


@pytest.fixture
def learn(data, model):
    chats = ("--train-data", str(data / "chats.jsonl"))
    return lambda *flags: load_config(["--loss-type", "sft_loss", *chats, "--hf-checkpoint", model, *flags])


def test_each_example_is_learned_once_and_nothing_is_evaluated(learn, data):
    cfg = learn("--rollout-batch-size", "16", "--num-steps-per-rollout", "2")
    assert (cfg.n_samples_per_prompt, cfg.global_batch_size, cfg.eval_interval) == (1, 8, 0)
    demo = load_config(["--loss-type", "sft_loss", "--train-data", str(data / "chats.jsonl")])
    assert (demo.n_samples_per_prompt, demo.eval_interval) == (1, 0) and demo.lr == 2e-4
    assert learn("--eval-data", str(data / "chats.jsonl"), "--eval-interval", "2").eval_interval == 2
    assert load_config(["--loss-type", "sft_loss", "--sft-from", str(data / "run"), "--sft-min-reward", "0.5"])


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--eval-interval", "2"), "--eval-interval 2: .* no engine runs.* Give --eval-data .* agentrl eval"),
        (("--eval-data", "."), "--eval-data has no effect without --eval-interval"),
        (("--eval-data", "no.jsonl", "--eval-interval", "2"), "--eval-data: no such file: no.jsonl"),
        (("--best-metric", "eval/nll"), "--best-metric has no effect"),
        (("--env", "search"), "--env has no effect with --loss-type sft_loss: nothing is played"),
        (("--prompt-data", "x.jsonl"), "--prompt-data names tasks.*give --train-data the file"),
        (("--eps-clip", "0.1"), "--eps-clip has no effect with --loss-type sft_loss"),
        (("--use-kl-loss",), "--use-kl-loss has no effect"),
        (("--advantage-estimator", "ppo"), "--advantage-estimator has no effect"),
        (("--rollout-num-engines", "2"), "--rollout-num-engines has no effect"),
        (("--sglang-mem-fraction-static", "0.5"), "has no effect"),
        (("--n-samples-per-prompt", "4"), "learns each once: give 1"),
        (("--rollout-temperature", "0.7"), "it must be 1"),
        (("--sft-from", "x"), "exclude each other"),
        (("--sft-min-reward", "1"), "no effect without --sft-from"),
        (("--rollout-max-context-len", "20000"), "max_position_embeddings 16384"),
    ],
)
def test_what_does_not_go_with_it_is_refused(learn, flags, words):
    with pytest.raises(ConfigError, match=words):
        learn(*flags)


def test_data_must_be_there(model, tmp_path):
    given = ["--loss-type", "sft_loss", "--hf-checkpoint", model]
    for flags, words in (
        ((), "are both missing"),
        (("--train-data", str(tmp_path / "no.jsonl")), "--train-data: no such file"),
        (("--sft-from", str(tmp_path)), "not a run folder"),
    ):
        with pytest.raises(ConfigError, match=words):
            load_config([*given, *flags])


def test_data_without_the_loss_is_refused(refused, data):
    assert "--train-data has no effect without --loss-type sft_loss" in refused(
        "--train-data", str(data / "chats.jsonl")
    )
