import json
from pathlib import Path

import pytest

from agentrl.config import PRESETS, Config, EvalConfig, demo_folder, load_config, load_eval_config, resolve
from agentrl.config.options import options
from agentrl.errors import CheckpointError, ConfigError


@pytest.fixture
def run_folder(tmp_path, load):
    folder = tmp_path / "run"
    (folder / "checkpoints" / "step_000004").mkdir(parents=True)
    config = load(
        "--lr",
        "1e-4",
        "--num-rollout",
        "8",
        "--max-turns",
        "3",
        "--env-arg",
        "topk=2",
        "--save-hf",
        str(tmp_path / "hf"),
    )
    (folder / "config.json").write_text(json.dumps(config.replace(output_dir="elsewhere", load="older").to_dict()))
    return folder


@pytest.fixture
def demo_model(monkeypatch, tmp_path):
    """The embedded model, as far as the configuration looks at it."""
    folder = tmp_path / "assets" / "demo"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"num_hidden_layers": 4, "max_position_embeddings": 1024}))
    for module in ("presets", "serialize"):
        monkeypatch.setattr(f"agentrl.config.{module}.demo_folder", lambda: folder)
    return str(folder)


def test_presets_name_real_options():
    for values in PRESETS.values():
        assert set(values) <= set(options(Config))


def test_without_a_model_the_demo_and_its_preset(demo_model):
    resolved = resolve(Config, ["--env", "search", "--lr", "1e-3"])
    cfg = resolved.config
    assert cfg.hf_checkpoint == demo_model
    assert cfg.lr == 1e-3 and cfg.rollout_max_context_len == PRESETS["demo"]["rollout_max_context_len"]
    assert resolved.sources["lr"] == "--lr" and resolved.sources["dtype"] == "preset"
    assert load_config(["--env", "search", "--hf-checkpoint", "demo", "--lr", "1e-3"]) == cfg
    assert load_eval_config(["--env", "search"]).max_turns == PRESETS["demo"]["max_turns"]


@pytest.mark.parametrize(
    ("positions", "context", "response"),
    [(1024, 1024, 512), (4096, 4096, 1024), (32768, 8192, 1024), (None, 8192, 1024)],
)
def test_an_episode_fits_the_positions_of_the_model_without_being_told(tmp_path, positions, context, response):
    model = {"num_hidden_layers": 4, "num_attention_heads": 2, "max_position_embeddings": positions}
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in model.items() if v is not None}))
    cfg = load_eval_config(["--env", "search", "--hf-checkpoint", str(tmp_path)])
    assert (cfg.rollout_max_context_len, cfg.rollout_max_response_len) == (context, response)
    given = load_eval_config(["--env", "search", "--hf-checkpoint", str(tmp_path), "--rollout-max-response-len", "99"])
    assert (given.rollout_max_context_len, given.rollout_max_response_len) == (context, 99)


@pytest.mark.parametrize(
    ("flags", "steps"),
    [
        (("--env", "search"), 4),
        (("--env", "search", "--num-steps-per-rollout", "2"), 2),
        (("--env", "search", "--rollout-batch-size", "3"), 1),
        (("--env", "search", "--global-batch-size", "64"), 2),
        (("--env", "search", "--advantage-estimator", "rloo"), 1),
        (("--env", "search", "--async-buffer-size", "0"), 4),
        (("--env", "search", "--async-buffer-size", "2"), 1),
        (("--env", "search", "--partial-rollout", "--over-sampling-batch-size", "24"), 1),
        (("--env", "search", "--replay-share", "0.25"), 1),
        (("--env", "calculator", "--rollout-max-context-len", "1000"), 1),
    ],
)
def test_the_demo_takes_several_steps_where_batch_and_algorithm_are_its_own_and_tokens_new(demo_model, flags, steps):
    assert load_config(flags).num_steps_per_rollout == steps


def test_the_embedded_model_travels_by_name(demo_model):
    cfg = load_config(["--env", "search", "--use-kl-loss"])
    saved = cfg.to_dict()
    assert saved["hf_checkpoint"] == saved["ref_load"] == "demo"
    assert Config.from_dict(saved) == cfg


def test_a_model_of_ones_own_has_no_preset(load):
    assert load().lr == Config().lr


def test_load_takes_over_the_runs_configuration(run_folder):
    cfg = load_config(["--load", str(run_folder)])
    assert (cfg.lr, cfg.num_rollout, cfg.env_args) == (1e-4, 8, {"topk": 2})
    assert cfg.load == str(run_folder) and cfg.output_dir == str(run_folder)


def test_flags_replace_what_was_loaded(run_folder, tmp_path):
    cfg = load_config(["--load", str(run_folder), "--num-rollout", "20", "--output-dir", str(tmp_path / "new")])
    assert (cfg.num_rollout, cfg.lr, cfg.output_dir) == (20, 1e-4, str(tmp_path / "new"))


def test_load_finds_the_run_of_a_checkpoint(run_folder):
    assert load_config(["--load", str(run_folder / "checkpoints" / "step_000004")]).lr == 1e-4


def test_what_followed_from_a_replaced_option_follows_again(run_folder):
    cfg = load_config(["--load", str(run_folder), "--rollout-batch-size", "16"])
    assert (cfg.global_batch_size, cfg.num_steps_per_rollout) == (128, 1)
    cfg = load_config(["--load", str(run_folder), "--global-batch-size", "64"])
    assert (cfg.global_batch_size, cfg.num_steps_per_rollout) == (64, 4)


def test_torn_configuration_of_a_run(run_folder):
    text = (run_folder / "config.json").read_text()
    (run_folder / "config.json").write_text(text[: len(text) - 40])
    with pytest.raises(CheckpointError, match="config.json"):
        load_config(["--load", str(run_folder)])


def test_evaluating_a_run_takes_its_environment_and_limits(run_folder):
    cfg = load_eval_config(["--run", str(run_folder)])
    assert isinstance(cfg, EvalConfig)
    assert (cfg.env, cfg.max_turns, cfg.env_args, cfg.output_dir) == (("search",), 3, {"topk": 2}, None)
    with pytest.raises(ConfigError, match="not a run folder"):
        load_eval_config(["--run", str(run_folder.parent)])


def test_the_demo_preset_runs_with_the_shipped_model():
    if not (demo_folder() / "config.json").is_file():
        pytest.skip("the embedded model is not built in this checkout")
    cfg = load_config(["--env", "search"])
    assert cfg.global_batch_size * 4 == cfg.rollout_batch_size * cfg.n_samples_per_prompt


def test_documentation_is_current():
    from agentrl.config.docs import render

    page = Path(__file__).parents[2] / "docs" / "configuration.md"
    assert page.read_text(encoding="utf-8") == render(), "run: python -m agentrl.config.docs docs/configuration.md"
