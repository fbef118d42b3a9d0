import os
import sys
import types

import pytest

from agentrl.cli.main import main


@pytest.fixture
def called(monkeypatch):
    """Replace ``module.function`` by a recorder of its calls."""

    def install(module_name, function):
        calls = []
        module = types.ModuleType(module_name)
        setattr(module, function, lambda *args, **kwargs: calls.append((args, kwargs)))
        monkeypatch.setitem(sys.modules, module_name, module)
        return calls

    return install


def test_eval(called, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    calls = called("agentrl.evaluation.run", "evaluate")
    assert main(["eval", "--env", "search", "--hf-checkpoint", str(tmp_path), "--limit", "9", "--split", "train"]) == 0
    ((config,), _) = calls[0]
    assert (config.eval_tasks, config.split) == (9, "train")


def test_export(called, capsys):
    calls = called("agentrl.data.export", "export")
    assert main(["export", "--run", "runs/x", "--output-dir", "out", "--checkpoint", "4"]) == 0
    assert calls == [(("runs/x", "out"), {"checkpoint": "4"})]
    assert main(["export", "--run", "runs/x"]) == 2
    assert "--output-dir" in capsys.readouterr().err


def test_convert(called, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    calls = called("agentrl.trainer.megatron.dist_checkpoint", "to_dist")
    sys.modules["agentrl.trainer.megatron.dist_checkpoint"].to_hf = lambda *args: calls.append((args, {}))
    model, of_megatron, full, new = (tmp_path / name for name in ("model", "dist", "full", "new"))
    for folder, file in ((model, "config.json"), (of_megatron, "latest_checkpointed_iteration.txt"), (full, "file")):
        folder.mkdir()
        (folder / file).touch()
    flags = ["--hf-checkpoint", str(model), "--output-dir", str(new)]
    assert main(["convert", *flags]) == main(["convert", "--load", str(of_megatron), *flags]) == 0
    assert [args[:-1] for args, _ in calls] == [(model, new), (of_megatron, model, new)]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    for wrong, said in (
        (flags[:2], "needs --output-dir"),
        (flags[2:], "needs --hf-checkpoint MODEL: the model to convert"),
        (["--load", str(of_megatron), *flags[2:]], "does not say its architecture and has no tokenizer"),
        ([*flags[:2], "--output-dir", str(full)], "holds something already; give a new folder"),
        (["--hf-checkpoint", str(of_megatron), *flags[2:]], "give it with --load"),
    ):
        assert main(["convert", *wrong]) == 2
        assert said in capsys.readouterr().err
    assert len(calls) == 2


def test_serve_retriever(called, capsys):
    calls = called("agentrl.retrieval.server", "serve")
    assert main(["serve-retriever", "--corpus", "c.jsonl", "--port", "0", "--topk", "5"]) == 0
    (((_, *listening), options),) = calls
    assert (listening, options) == (["127.0.0.1", 0], {"topk": 5})
    assert main(["serve-retriever", "--port", "70000"]) == 2
    assert "from 0 to 65535, got 70000" in capsys.readouterr().err
    assert main(["serve-retriever", "--copus", "c"]) == 2
    assert "--corpus" in capsys.readouterr().err


def test_env_list_names_the_search_environment(capsys):
    assert main(["env", "list"]) == 0
    assert "search" in capsys.readouterr().out.split()


def test_env_show_describes_one(capsys):
    assert main(["env", "show", "search", "--env-arg", "topk=2"]) == 0
    out = capsys.readouterr().out
    assert "split train:" in out and "split test:" in out and "tool search(query" in out and "[user]" in out


def test_env_show_says_nothing_of_the_base_class(tmp_path, capsys):
    (tmp_path / "bare.py").write_text(
        "import agentrl\nclass Bare(agentrl.ToolEnv):\n    tasks = {'train': ['a'], 'test': ['b']}\n    reward = 'f1'\n"
    )
    assert main(["env", "show", f"{tmp_path}/bare.py:Bare"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[1:3] == ["", "split train: 1 tasks"] and "Subclasses set" not in out
    assert main(["env", "show", f"{tmp_path}/bare.py"]) == 2
    assert "add :ClassName" in capsys.readouterr().err


def test_export_of_a_run_that_is_not_there_speaks_of_the_run(tmp_path, capsys):
    assert main(["export", "--run", str(tmp_path / "no"), "--output-dir", str(tmp_path / "out")]) == 3
    assert "run folder" in (err := capsys.readouterr().err) and "--load" not in err


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["env"], "one of list, show, check, play, new"),
        (["env", "shwo"], "'shwo'"),
        (["env", "show"], "name of an environment"),
        (["env", "list", "x"], "'x'"),
        (["env", "show", "serch"], "search"),
        (["env", "show", "search", "--env-arg"], "--env-arg"),
        (["env", "show", "search", "--topk=2"], "--topk"),
    ],
)
def test_wrong_use_of_env(words, part, capsys):
    assert main(words) == 2
    assert part in capsys.readouterr().err
