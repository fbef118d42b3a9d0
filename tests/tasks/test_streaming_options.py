"""Task data by flags: in every form, streamed, in training and in evaluation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import agentrl
from agentrl.config import load_config, load_eval_config
from agentrl.config.template import template_source
from agentrl.errors import ConfigError, DataError
from agentrl.evaluation.heldout import held_out_sets
from agentrl.loading import portable_source
from agentrl.orchestrator.launch import with_absolute_paths
from agentrl.tasks.source import TaskSource

FUNCTION = "def by_split(split):\n    yield from (f'{split} {n}' for n in range(4))\n"


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    for name in ("one.jsonl", "shards/a.jsonl", "shards/b.jsonl", "named/train.jsonl", "named/test.jsonl"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text("".join(json.dumps({"prompt": f"{name} {n}", "label": "1"}) + "\n" for n in range(30)))
    Path("made.py").write_text(FUNCTION)
    return tmp_path


def environment(config):
    spec, kwargs = config.env_spec()
    return agentrl.make(spec, **kwargs)


@pytest.mark.parametrize("flags", [[], ["--streaming-data"], ["--streaming-data", "--num-data-workers", "2"]])
@pytest.mark.parametrize(
    ("data", "tasks"), [("one.jsonl", 30), ("shards", 60), ("shards/", 60), ("shards/*.jsonl", 60), ("named", 30)]
)
def test_training_takes_every_form(here, data, tasks, flags):
    config = with_absolute_paths(load_config(["--prompt-data", data, *flags]))
    env = environment(config)
    assert env.num_tasks("train") == tasks
    source = TaskSource.of_env(config.env_spec()[0], env, seed=3)
    drawn = {env.reset(options=task.options)[0] for task in source.next_groups(tasks)}
    assert len(drawn) == tasks


def test_the_drawn_tasks_do_not_depend_on_streaming(here):
    def drawn(*flags):
        config = load_config(["--prompt-data", "shards", "--env-arg", "test_fraction=0.3", *flags])
        env = environment(config)
        source = TaskSource.of_env(config.env_spec()[0], env, seed=5)
        held_out = held_out_sets(
            load_eval_config(["--prompt-data", "shards", "--env-arg", "test_fraction=0.3", *flags])
        )
        tasks = [*source.next_groups(70), *held_out[0].tasks]
        return [(task.task_id, env.reset(options=task.options)) for task in tasks]

    assert drawn() == drawn("--streaming-data") == drawn("--streaming-data", "--num-data-workers", "3")


def test_evaluation_takes_what_the_data_holds_out_itself(here):
    argv = ["--eval-prompt-data", "whole", "one.jsonl", "--eval-prompt-data", "own", "named", "--streaming-data"]
    sets = held_out_sets(load_eval_config(argv))
    assert [(s.name, s.split, len(s.tasks)) for s in sets] == [("whole", "all", 30), ("own", "test", 30)]
    env = agentrl.make(sets[1].spec, **sets[1].kwargs)
    assert env.reset(options=sets[1].tasks[0].options)[0].startswith("named/test.jsonl")


def test_a_chat_template_is_found_from_another_folder(here, monkeypatch):
    Path("mine.jinja").write_text("{{ messages }}")
    config = with_absolute_paths(load_config(["--prompt-data", "one.jsonl", "--chat-template", "mine.jinja"]))
    monkeypatch.chdir("/")
    assert template_source(config) == "{{ messages }}"


def test_a_function_by_name(here, monkeypatch):
    config = with_absolute_paths(
        load_config(["--prompt-data", "made.py:by_split", "--custom-rm-path", "made.py:by_split"])
    )
    assert config.prompt_data == f"{here}/made.py:by_split"
    monkeypatch.chdir("/")
    assert environment(config).num_tasks("test") == 4
    assert portable_source("package.module:rows") == "package.module:rows"
    assert portable_source("data/*.jsonl") == "/data/*.jsonl"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--prompt-data", "two.jsonl"], "--prompt-data: no such file: two.jsonl"),
        (["--prompt-data", "*.parquet"], "--prompt-data: no file matches: [*].parquet"),
        (["--prompt-data", "gone.py:rows"], "--prompt-data: no such file: gone.py"),
        (["--prompt-data", "one.jsonl", "--num-data-workers", "2"], "--num-data-workers has no effect without --stre"),
        (["--prompt-data", "one.jsonl", "--streaming-data", "--num-data-workers", "0"], "--num-data-workers: expected"),
        (["--env", "search", "--streaming-data"], "--streaming-data has no effect without --prompt-data"),
    ],
)
def test_what_does_not_fit_is_refused(here, argv, message):
    for load in (load_config, load_eval_config):
        with pytest.raises(ConfigError, match=message):
            load(argv)


def test_a_bad_line_of_streamed_data_is_named_before_anything_starts(here):
    with Path("one.jsonl").open("a") as lines:
        lines.write("nothing\n")
    config = load_config(["--prompt-data", "one.jsonl", "--streaming-data"])
    with pytest.raises(DataError, match="one.jsonl:31: not JSON"):
        environment(config)
