"""What is wrong in a command line is said at once, and what other programs' flags mean here."""

import json

import pytest

from agentrl.cli.train import run as train_command
from agentrl.config import Config, EvalConfig, load_config, load_eval_config
from agentrl.config.layers import load_options, resolve
from agentrl.config.names import ADVICE, IMPLIED, NOT_AVAILABLE, RENAMED
from agentrl.config.options import options
from agentrl.config.parse import parse_flags
from agentrl.errors import ConfigError
from agentrl.rollout.options import episode_limits, eval_params, rollout_params


def test_everything_wrong_in_itself_is_said_at_once(load, tmp_path):
    file = tmp_path / "run.json"
    file.write_text(json.dumps({"sede": 1, "lr": "fast", "max_turns": 0}))
    flags = ["--group-rm", "--lrr", "1", "more", "--num-rollout", "2.5", "--seed", "-1", "--sglang-nope", "3", "stray"]
    with pytest.raises(ConfigError) as caught:
        load("--config", str(file), *flags)
    lines = str(caught.value).splitlines()
    for part in ("sede", "lr: expected a number", "--group-rm", "--lrr", "2.5", "--seed", "nope", "--max-turns"):
        assert sum(part in line for line in lines) == 1, (part, lines)
    assert not any("stray" in line for line in lines), "the value of an option that is not known"


def test_what_does_not_fit_together_is_said_at_once(refused):
    message = refused("--rollout-top-p", "0.9", "--context-parallel-size", "2", "--min-lr", "1")
    assert all(flag in message for flag in ("--rollout-top-p", "--context-parallel-size", "--min-lr"))


def test_a_value_out_of_range_is_not_blamed_on_what_follows_from_it(refused):
    assert refused("--n-samples-per-prompt", "0").count("\n") == 0


def test_a_config_file_that_cannot_be_read_hides_nothing(refused, tmp_path):
    message = refused("--config", str(tmp_path / "absent.toml"), "--lrr", "1")
    assert "absent.toml" in message and "--lrr" in message


def test_small_commands_say_it_at_once_too():
    from agentrl.cli.export import Options

    with pytest.raises(ConfigError) as caught:
        load_options(Options, ["--rnu", "x", "--nope", "y", "--config", "z"])
    assert all(part in str(caught.value) for part in ("--rnu", "--nope", "--config"))


def test_needless_flags_are_accepted_with_a_note(model, monkeypatch, capsys):
    flags = ["--env", "search", "--hf-checkpoint", model, "--balance-data", "--vocab-size", "151936", "--swiglu"]
    flags += ["--use-fault-tolerance", "--attention-backend", "flash", "--lr", "1e-5"]
    resolved = resolve(Config, flags)
    assert resolved.config.lr == 1e-5 and len(resolved.notes) == 5
    monkeypatch.setattr("agentrl.cli.train.require", lambda *_: None)
    monkeypatch.setattr("agentrl.orchestrator.launch.train", lambda config: 0)
    assert train_command(flags) == 0
    said = capsys.readouterr().err.splitlines()
    assert "note: --balance-data has no effect: micro-batches are always balanced over the ranks." in said
    assert sum(line.startswith("note: ") for line in said) == 5


def test_needless_keys_of_a_file_are_accepted_with_a_note(model, tmp_path):
    file = tmp_path / "run.json"
    file.write_text(json.dumps({"env": "search", "hf_checkpoint": model, "balance_data": True}))
    resolved = resolve(Config, ["--config", str(file)])
    assert [note.split(" has")[0] for note in resolved.notes] == [f"{file}: balance_data"]


def test_notes_are_for_training_only(model):
    with pytest.raises(ConfigError, match="--swiglu"):
        load_eval_config(["--env", "search", "--hf-checkpoint", model, "--swiglu"])


@pytest.mark.parametrize(
    ("flags", "said", "not_said"),
    [
        (("--rollout-seed", "1"), "Use --seed", "rollout-batch-size"),
        (("--wandb-key", "k"), "WANDB_API_KEY", "label"),
        (("--reward-key", "score"), "added up", "metadata"),
        (("--use-opd",), "on-policy distillation", "pause-mode"),
        (("--eval-config", "x"), "--eval-prompt-data", "?"),
        (("--skip-eval-before-train",), "--no-eval-before-train", "?"),
        (("--sglang-server-concurrency", "512"), "--rollout-concurrency", "?"),
        (("--save-retain-interval", "3"), "--keep-last", "save-interval"),
        (("--eval-input-key", "q"), "--env-arg NAME.input_key=KEY", "?"),
        (("--num-epoch", "3"), "--num-rollout", "?"),
        (("--num-virtual-stages-per-pipeline-rank", "2"), "--virtual-pipeline-model-parallel-size", "?"),
        (("--num-layers-per-virtual-pipeline-stage", "2"), "layers of a pipeline stage ÷ this number", "?"),
        (("--decoder-last-pipeline-num-layers", "3"), "--num-layers-in-last-pipeline-stage", "?"),
        (("--custom-rm-path", "pkg.mod.func", "--prompt-data", "x.jsonl"), "write pkg.mod:func", "?"),
    ],
)
def test_flags_of_slime_get_advice_that_does_not_mislead(refused, flags, said, not_said):
    message = refused(*flags)
    assert said in message and not_said not in message


def test_no_name_stands_in_two_tables_or_is_an_option():
    own = {option.flag[2:] for option in options(Config).values()}
    tables = [NOT_AVAILABLE, IMPLIED, ADVICE, RENAMED]
    names = [name for table in tables for name in table]
    assert len(set(names)) == len(names)
    assert not own & {*NOT_AVAILABLE, *IMPLIED, *ADVICE}
    for right in RENAMED.values():
        for flag in (right,) if isinstance(right, str) else right:
            words = flag.split(" and ")[0].split()
            read = [parse_flags(cls, [words[0], *(words[1:] or ["1"])])[0] for cls in (Config, EvalConfig)]
            assert any(not any("Unknown" in problem for problem in given.problems) for given in read), flag


def test_evaluation_has_lengths_and_stops_of_its_own(load):
    cfg = load("--rollout-stop", "</a>", "</b>", "--eval-interval", "1", "--eval-max-response-len", "2048")
    assert (rollout_params(cfg).max_new_tokens, rollout_params(cfg).stop) == (1024, ("</a>", "</b>"))
    assert (eval_params(cfg).max_new_tokens, eval_params(cfg).stop) == (2048, ("</a>", "</b>"))
    cfg = cfg.replace(eval_stop=("!",), eval_max_context_len=16384)
    assert eval_params(cfg).stop == ("!",) and rollout_params(cfg).stop == ("</a>", "</b>")
    in_training, held_out = episode_limits(cfg), episode_limits(cfg.held_out)
    assert (in_training.max_context_len, in_training.max_response_len) == (8192, 1024)
    assert (held_out.max_context_len, held_out.max_response_len) == (16384, 2048)
    assert cfg.longest_context == 16384


def test_lengths_of_evaluation_are_checked(refused):
    assert "--eval-max-response-len 9000" in refused("--eval-max-response-len", "9000")
    assert "--eval-max-context-len 20000" in refused("--eval-max-context-len", "20000")


def test_an_evaluation_takes_over_what_training_evaluates_with(model, tmp_path):
    flags = ["--env", "search", "--hf-checkpoint", model, "--rollout-stop", "</a>", "--eval-max-response-len", "99"]
    (tmp_path / "config.json").write_text(json.dumps(load_config(flags).to_dict()))
    run = ["--run", str(tmp_path)]
    cfg = load_eval_config(run)
    assert (eval_params(cfg).stop, eval_params(cfg).max_new_tokens) == (("</a>",), 99)
    assert eval_params(load_eval_config([*run, "--max-tokens", "7"])).max_new_tokens == 7
