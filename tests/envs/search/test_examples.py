"""What envs_examples/search_r1 and the documentation show is run here."""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import httpx
import pytest

from agentrl.demo import MODEL_DIR
from agentrl.envs.builtin.search import SearchEnv, SearchR1Env

EXAMPLE = Path(__file__).parents[3] / "envs_examples" / "search_r1"
CONFIGS = sorted(EXAMPLE.glob("*.toml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_configuration_is_accepted_by_the_command_line(path: Path, tmp_path: Path):
    config = pytest.importorskip("agentrl.config")
    model = tmp_path / "model"
    model.mkdir()
    for file in MODEL_DIR.iterdir():
        shutil.copy(file, model)
    sizes = json.loads((model / "config.json").read_text(encoding="utf-8"))
    (model / "config.json").write_text(json.dumps({**sizes, "max_position_embeddings": 32768}), encoding="utf-8")
    loaded = config.load_config(
        ["--config", str(path), "--hf-checkpoint", str(model), "--output-dir", str(tmp_path / "run")]
    )
    batch = loaded.rollout_batch_size * loaded.n_samples_per_prompt
    assert batch == loaded.global_batch_size * loaded.num_steps_per_rollout


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_arguments_of_a_configuration_are_the_environments(path: Path, write_jsonl):
    config = tomllib.loads(path.read_text(encoding="utf-8"))
    env_class = {"search": SearchEnv, "agentrl.envs.builtin.search:SearchR1Env": SearchR1Env}[config["env"]]
    questions = str(write_jsonl([{"question": "q", "answer": "a"}], "questions.jsonl"))
    given = {k: questions if k.endswith("_data") else v for k, v in config["env_args"].items()}
    assert env_class(**given).reset(seed=0)[0]


def test_the_readme_names_every_file_and_only_real_keys():
    text = (EXAMPLE / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"`([\w.-]+\.toml)`", text)) == {path.name for path in CONFIGS}
    used = set().union(*(tomllib.loads(path.read_text(encoding="utf-8")) for path in CONFIGS))
    hyper_parameters = text.split("## Hyper-parameters")[1].split("##")[0]
    here = [row.rpartition(" | ")[2] for row in hyper_parameters.splitlines() if row.startswith("| ")][1:]
    named = {key for cell in here for key in re.findall(r"`([a-z_]+)", cell)}
    assert len(named) > 15 and named <= used


def test_the_python_of_the_readme_runs(write_jsonl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    text = (EXAMPLE / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.S)
    (question,) = re.findall(r"```json\n(.*?)```", text, re.S)
    write_jsonl([question.strip()], "questions.jsonl")
    write_jsonl([{"title": "Bulgakov", "text": "He wrote it."}], "passages.jsonl")
    monkeypatch.chdir(tmp_path)
    scope: dict = {}
    exec(code, scope)
    assert scope["observation"] == "Who wrote The Master and Margarita?"


def test_the_serve_command(corpus: Path):
    pytest.importorskip("agentrl.cli.serve_retriever")
    command = [sys.executable, "-m", "agentrl.cli.main", "serve-retriever", "--corpus", str(corpus), "--port", "0"]
    root = str(EXAMPLE.parents[1])
    env = {**os.environ, "PYTHONPATH": root}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
    try:
        line = process.stdout.readline()
        found = re.search(r"serving 3 passages on (http://\S+)", line)
        assert found, line
        answer = httpx.post(found.group(1), json={"queries": ["Egypt"], "topk": 1, "return_scores": True}, timeout=10)
        assert answer.json()["result"][0][0]["document"]["id"] == "n"
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=20)


@pytest.mark.parametrize("env_class", [SearchEnv, SearchR1Env])
def test_the_example_in_the_docstring_is_true(env_class):
    lines = [line.strip() for line in inspect.getdoc(env_class).splitlines()]
    scope = {"SearchEnv": SearchEnv, "SearchR1Env": SearchR1Env, "json": json}
    checked = 0
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if not line.startswith(">>> "):
            continue
        if not following or following.startswith(">>>"):
            exec(line[4:], scope)
            continue
        shown = re.escape(following).replace(re.escape("..."), ".*")
        assert re.fullmatch(shown, repr(eval(line[4:], scope)))
        checked += 1
    assert checked == 2
