"""What `agentrl eval` accepts, and what it refuses because it would do nothing."""

import json

import pytest

from agentrl.config import load_config, load_eval_config
from agentrl.errors import ConfigError


@pytest.fixture
def held_out(tmp_path):
    path = tmp_path / "held_out.jsonl"
    path.write_text('{"prompt": "1+1", "label": "2"}\n')
    return str(path)


@pytest.fixture
def run(tmp_path, model):
    """A training run's folder."""
    folder = tmp_path / "run"
    folder.mkdir()
    cfg = load_config(["--env", "search", "--hf-checkpoint", model, "--rollout-temperature", "0.7"])
    (folder / "config.json").write_text(json.dumps(cfg.to_dict()))
    return str(folder)


def refused(*flags):
    with pytest.raises(ConfigError) as caught:
        load_eval_config(list(flags))
    return str(caught.value)


@pytest.mark.parametrize(
    ("flag", "part"),
    [
        ("--rollout-temperature", "Use --eval-temperature"),
        ("--rollout-top-p", "Use --eval-top-p"),
    ],
)
def test_sampling_of_training_is_not_taken(flag, part):
    assert part in refused("--env", "search", flag, "0.5")


def test_a_run_is_evaluated_whatever_it_sampled_with(run, model):
    cfg = load_eval_config(["--run", run])
    assert (cfg.env, cfg.hf_checkpoint, hasattr(cfg, "rollout_temperature")) == (("search",), model, False)


def test_one_model_is_evaluated(run, model):
    message = refused("--run", run, "--hf-checkpoint", model)
    assert f"--run {run} and --hf-checkpoint {model} exclude each other" in message


def test_held_out_files_alone(held_out, model, tmp_path):
    from agentrl.data.rundir import RunDir

    cfg = load_eval_config(["--eval-prompt-data", "sums", held_out, "--hf-checkpoint", model])
    assert (cfg.env, cfg.prompt_data, cfg.eval_prompt_data) == ((), None, (("sums", held_out),))
    with RunDir.create(cfg, base=tmp_path / "runs") as folder:
        assert folder.path.name.startswith("eval-held_out-")
    for flag, value in (("--env-arg", "a=1"), ("--split", "train")):
        assert f"{flag} has no effect without --env" in refused("--eval-prompt-data", "sums", held_out, flag, value)
    assert "--eval-prompt-data NAME FILE" in refused()


def test_a_run_that_is_not_there_is_the_only_problem():
    with pytest.raises(ConfigError) as caught:
        load_config(["--load", "nothere"])
    assert str(caught.value) == "--load: no such run folder or checkpoint: nothere"


def test_the_tool_output_budget_is_off_unless_it_is_given(load):
    assert load().max_tool_output_tokens is None
    assert load("--max-tool-output-tokens", "500").max_tool_output_tokens == 500
