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
    from agentrl.data.run_folder import RunDir

    cfg = load_eval_config(["--eval-prompt-data", "sums", held_out, "--hf-checkpoint", model])
    assert (cfg.env, cfg.prompt_data, cfg.eval_prompt_data) == ((), None, (("sums", held_out),))
    with RunDir.create(cfg, base=tmp_path / "runs") as folder:
        assert folder.path.name.startswith("eval-held_out-")
    for flag, value in (("--env-arg a", "a=1"), ("--split", "train")):
        words = ("--eval-prompt-data", "sums", held_out, flag.split()[0], value)
        assert f"{flag} has no effect without --env" in refused(*words)
    assert "--eval-prompt-data NAME FILE" in refused()


def test_a_run_that_is_not_there_is_the_only_problem():
    with pytest.raises(ConfigError) as caught:
        load_config(["--load", "nothere"])
    assert str(caught.value).startswith("--load: no such run folder or checkpoint: nothere. To start a run there")


def test_the_tool_output_budget_is_off_unless_it_is_given(load):
    assert load().max_tool_output_tokens is None
    assert load("--max-tool-output-tokens", "500").max_tool_output_tokens == 500


# -- several environments, named tasks, a server ---------------------------------------------------------


@pytest.mark.parametrize(
    "flags",
    [("--env", "search,textgame"), ("--env", "search", "--env", "textgame"), ("--env", " search , textgame,")],
)
def test_environments_may_be_repeated_or_listed(flags, model):
    cfg = load_eval_config([*flags, "--hf-checkpoint", model])
    assert cfg.env == ("search", "textgame")
    assert load_config(
        ["--env", "search", "--eval-interval", "1", "--eval-env", "a,b", "--eval-env", "c"]
    ).eval_env == (
        "a",
        "b",
        "c",
    )


def test_lists_in_files_and_back(tmp_path, model):
    file = tmp_path / "eval.toml"
    file.write_text(f'env = ["search", "textgame"]\ntask_id = "3"\nhf_checkpoint = "{model}"\n')
    cfg = load_eval_config(["--config", str(file)])
    assert (cfg.env, cfg.task_id) == (("search", "textgame"), ("3",))
    assert type(cfg).from_dict(json.loads(json.dumps(cfg.to_dict()))) == cfg
    assert load_eval_config(["--config", str(file), "--env", "search"]).env == ("search",), "a flag replaces the list"
    file.write_text("env = [1]\n")
    assert "expected a list of text, got [1]" in refused("--config", str(file))


def test_names_people_know_from_elsewhere(model):
    flags = ["--temperature", "0.7", "--top-p", "0.9", "--top-k", "20", "--max-tokens", "64", "--limit", "3"]
    cfg = load_eval_config(["--env", "search", "--hf-checkpoint", model, *flags])
    assert (cfg.eval_temperature, cfg.eval_top_p, cfg.eval_top_k) == (0.7, 0.9, 20)
    assert (cfg.rollout_max_response_len, cfg.eval_tasks) == (64, 3)
    assert "Use --task-id" in refused("--task-ids", "3")
    assert "Use --output-dir" in refused("--resume", "x")


SERVER = ("--env", "search", "--base-url", "http://127.0.0.1:1/v1")


def test_a_server_needs_no_model_folder():
    cfg = load_eval_config(SERVER)
    assert (cfg.hf_checkpoint, cfg.model, cfg.api_key_env) == (None, None, "OPENAI_API_KEY")
    assert (cfg.rollout_max_response_len, cfg.rollout_max_context_len) == (1024, 8192), "not the demo model's limits"


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (("--base-url", "localhost:8000"), "--base-url: expected http://HOST:PORT/v1"),
        (("--rollout-num-engines", "2"), "--base-url and --rollout-num-engines exclude each other"),
        (("--deterministic",), "--base-url and --deterministic exclude each other"),
        (("--deterministic", "--threads", "2"), "--threads has no effect with --deterministic"),
        (("--sglang-mem-fraction-static", "0.5"), "--base-url and --sglang-mem-fraction-static exclude each other"),
        (("--checkpoint", "best"), "--checkpoint has no effect without --run"),
        (("--task-id", "1", "--limit", "2"), "--limit and --task-id exclude each other"),
        (("--fail-on-error", "1.5"), "--fail-on-error: expected a number from 0 to 1, got 1.5"),
    ],
)
def test_what_does_not_go_with_a_server_or_at_all(flags, part):
    assert part in refused(*SERVER, *flags)


def test_a_model_name_without_a_server_does_nothing(model):
    message = refused("--env", "search", "--hf-checkpoint", model, "--model", "gpt", "--api-key-env", "KEY")
    assert "--model has no effect without --base-url" in message and "--api-key-env" in message
    assert "--base-url and --hf-checkpoint exclude" in refused(*SERVER, "--hf-checkpoint", model)


# -- a run's checkpoint ----------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["newest", "best", "40"])
def test_a_checkpoint_of_a_run(run, which):
    assert load_eval_config(["--run", run, "--checkpoint", which]).checkpoint == which


def test_a_checkpoint_that_is_none(run):
    assert "expected newest, best or a number of rollouts, got 'last'" in refused("--run", run, "--checkpoint", "last")
    assert "exclude each other" in refused(*SERVER, "--run", run)


def test_a_run_in_another_environment_leaves_its_arguments_behind(tmp_path):
    folder = tmp_path / "trained"
    folder.mkdir()
    cfg = load_config(
        ["--env", "search", "--env-arg", "topk=2", "--eval-env", "textgame", "--env-arg", "textgame.rooms=3",
         "--eval-interval", "1", "--max-turns", "3", "--rollout-max-context-len", "700"]
    )  # fmt: skip
    (folder / "config.json").write_text(json.dumps(cfg.to_dict()))
    same = load_eval_config(["--run", str(folder)])
    assert (same.env, same.eval_env, same.rollout_max_context_len) == (("search",), ("textgame",), 700)
    assert same.env_args == {"topk": 2, "textgame.rooms": 3}
    other = load_eval_config(["--run", str(folder), "--env", "textgame"])
    assert (other.env, other.env_args, other.rollout_max_context_len) == (("textgame",), {}, 1920)
    assert other.eval_env == () and other.eval_own_split, "what is named is what is evaluated"
    assert "--no-eval-own-split has no effect with several --env" in refused("--env", "a,b", "--no-eval-own-split")


# -- the embedded model's limits -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "limits"),
    [
        (("--env", "search"), (64, 512, 6)),
        (("--env", "textgame"), (128, 1920, 8)),
        (("--env", "search,textgame"), (128, 1920, 8)),
        (("--env", "textgame", "--rollout-max-context-len", "900"), (128, 900, 8)),
    ],
)
def test_the_limits_of_the_embedded_model_follow_the_environment(flags, limits):
    cfg = load_eval_config(flags)
    assert (cfg.rollout_max_response_len, cfg.rollout_max_context_len, cfg.max_turns) == limits


def test_the_same_holds_in_training():
    cfg = load_config(["--env", "textgame"])
    assert (cfg.rollout_max_response_len, cfg.rollout_max_context_len) == (128, 1920)
    both = load_config(["--env", "search", "--eval-interval", "1", "--eval-env", "textgame"])
    assert both.rollout_max_context_len == 1920


def test_arguments_of_other_environments_are_refused_where_there_are_none(load):
    with pytest.raises(ConfigError, match=r"--env-arg textgame.rooms: arguments of --env have no name before them"):
        load("--env-arg", "textgame.rooms=3")
    with pytest.raises(ConfigError, match="--eval-env has no effect without --eval-interval"):
        load("--eval-env", "textgame")
