import dataclasses

import pytest

from agentrl.config import Config, EvalConfig, load_config, load_eval_config
from agentrl.config.options import options
from agentrl.errors import ConfigError


def test_values_are_typed(load):
    cfg = load(
        "--lr",
        "3e-5",
        "--num-rollout=7",
        "--rollout-batch-size",
        "1_6",
        "--dtype",
        "fp32",
        "--use-kl-loss",
        "--no-tensorboard",
    )
    assert (cfg.lr, cfg.num_rollout, cfg.rollout_batch_size, cfg.dtype) == (3e-5, 7, 16, "fp32")
    assert cfg.use_kl_loss is True and cfg.tensorboard is False


def test_a_whole_number_may_have_a_unit(load, refused):
    assert load("--max-tokens-per-gpu", "8k").max_tokens_per_gpu == 8000
    assert load("--update-weight-buffer-size", "512Mi").update_weight_buffer_size == 512 * 2**20
    assert "'8kb'" in refused("--max-tokens-per-gpu", "8kb")


def test_text_in_brackets_is_one_text(load):
    assert load("--rollout-stop", "[END]").rollout_stop == ("[END]",)
    assert load("--rollout-stop", '["a"]', "b").rollout_stop == ('["a"]', "b")


def test_config_is_frozen(load):
    with pytest.raises(dataclasses.FrozenInstanceError):
        load().lr = 1.0


def test_switch_forms(load):
    assert load("--sequence-parallel", "--tensor-model-parallel-size", "2").sequence_parallel
    assert load("--use-kl-loss=true").use_kl_loss
    assert not load("--tensorboard", "false").tensorboard
    assert load("--use-kl-loss", "true", "--seed", "3").seed == 3


def test_last_of_a_repeated_flag_wins(load):
    assert load("--seed", "1", "--seed", "2").seed == 2


def test_repeatable_flags_collect(load, tmp_path):
    for name in ("a", "b", "c"):
        (tmp_path / name).write_text("{}\n")
    cfg = load(
        "--env-arg",
        "n=3",
        "--env-arg",
        "names=[1, 2]",
        "--env-arg",
        "text=plain words",
        "--env-arg",
        "eq=a=b",
        "--eval-interval",
        "2",
        "--eval-prompt-data",
        "one",
        str(tmp_path / "a"),
        "--eval-prompt-data",
        "two",
        str(tmp_path / "b"),
        "three",
        str(tmp_path / "c"),
    )
    assert cfg.env_args == {"n": 3, "names": [1, 2], "text": "plain words", "eq": "a=b"}
    assert cfg.eval_prompt_data == (
        ("one", str(tmp_path / "a")),
        ("two", str(tmp_path / "b")),
        ("three", str(tmp_path / "c")),
    )


def test_negative_numbers_are_values(refused):
    assert "--seed: expected a whole number at least 0, got -1" in refused("--seed", "-1")


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (("--rollout-batchsize", "4"), ("--rollout-batchsize", "Did you mean --rollout-batch-size?")),
        (("--lr-rate", "4"), ("--lr-rate",)),
        (("--no-tensorbord",), ("--no-tensorbord", "--no-tensorboard")),
        (("--zzzz",), ("Unknown flag --zzzz", "--help")),
        (("--bf16",), ("--dtype bf16",)),
        (("--limit", "3"), ("--eval-tasks",)),
        (("--group-rm",), ("not available yet",)),
        (("--async-bufer-size", "2"), ("Did you mean --async-buffer-size?",)),
        (("--lr", "fast"), ("--lr", "a number", "'fast'")),
        (("--lr", "nan"), ("--lr", "a number", "'nan'")),
        (("--num-rollout", "2.5"), ("--num-rollout", "a whole number", "'2.5'")),
        (("--num-rollout",), ("--num-rollout", "a whole number", "nothing")),
        (("--num-rollout", "--seed", "1"), ("--num-rollout", "nothing")),
        (("--config",), ("--config: expected a path, got nothing",)),
        (("--tensorboard=maybe",), ("--tensorboard", "true or false", "'maybe'")),
        (("--no-tensorboard=true",), ("--no-tensorboard takes no value",)),
        (("--dtype", "fp8"), ("--dtype", "auto, bf16, fp32", "'fp8'")),
        (("--env-arg", "novalue"), ("--env-arg", "KEY=VALUE", "'novalue'")),
        (("--eval-prompt-data", "name"), ("--eval-prompt-data", "NAME PATH")),
        (("--eval-prompt-data", "name", "path", "odd"), ("Unexpected argument 'odd'",)),
        (("stray",), ("'stray'", "begin with `--`")),
        (("--",), ("'--'",)),
    ],
)
def test_wrong_flags_say_what_and_what_to_do(refused, flags, parts):
    message = refused(*flags)
    assert all(part in message for part in parts), message


def test_every_option_has_help_and_a_group():
    for config_class in (Config, EvalConfig):
        for option in options(config_class).values():
            assert option.doc and option.doc.endswith((".", ")")), option.name
            assert option.group, option.name


def test_evaluation_shares_the_meaning_of_its_options():
    train = options(Config)
    for name, option in options(EvalConfig).items():
        if name != "env":  # several may be evaluated
            assert name not in train or option == train[name]


def test_evaluation_flags(model):
    cfg = load_eval_config(["--env", "search", "--hf-checkpoint", model, "--limit", "5", "--concurrency", "9"])
    assert (cfg.eval_tasks, cfg.rollout_concurrency, cfg.split, cfg.eval_temperature) == (5, 9, "test", 0.0)
    with pytest.raises(ConfigError, match="--lr"):
        load_eval_config(["--env", "search", "--hf-checkpoint", model, "--lr", "1"])


def test_a_model_path_may_start_at_home(model, monkeypatch):
    monkeypatch.setenv("HOME", model.removesuffix("/model"))
    assert load_config(["--env", "search", "--hf-checkpoint", "~/model"]).hf_checkpoint == model
