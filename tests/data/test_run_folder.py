import json
import os
import subprocess
import sys

import pytest

from agentrl.config import Config
from agentrl.data.files import JsonLines, atomic_file, read_jsonl
from agentrl.data.run_folder import RunDir, new_folder
from agentrl.errors import ConfigError, DataError, StorageError


@pytest.fixture
def config():
    return Config(env="search", hf_checkpoint="model", tensorboard=False)


def test_a_new_run_gets_its_own_folder(config, tmp_path):
    with RunDir.create(config, base=tmp_path) as first, RunDir.create(config, base=tmp_path) as second:
        assert first.path != second.path and first.path.name.startswith("search-") and second.path.name.endswith("-2")
        assert first.config.output_dir == str(first.path)
        assert first.path.stat().st_mode & 0o777 == 0o700, "conversations and weights are nobody else's business"
        assert first.logs.is_dir() and first.log_path("engine-0").parent == first.logs
        assert Config.from_dict(json.loads((first.path / "config.json").read_text())) == first.config
        assert json.loads((first.path / "run.json").read_text())["starts"][0]["python"]


def test_a_link_to_nowhere_takes_a_number(config, tmp_path):
    first = new_folder(config, tmp_path)
    first.symlink_to(tmp_path / "gone")
    assert new_folder(config, tmp_path) != first


def test_prompt_data_names_the_folder(config, tmp_path):
    run = RunDir.create(config.replace(env="", prompt_data="data/gsm8k.jsonl"), base=tmp_path)
    assert run.path.name.startswith("gsm8k-")
    run.close()


def test_a_folder_with_a_run_is_not_overwritten(config, tmp_path):
    wanted = config.replace(output_dir=str(tmp_path / "mine"))
    RunDir.create(wanted).close()
    with pytest.raises(ConfigError, match="holds a run already.*--load"):
        RunDir.create(wanted)


def test_one_process_at_a_time(config, tmp_path):
    run = RunDir.create(config, base=tmp_path)
    with pytest.raises(StorageError, match="another process"):
        RunDir.resume(run.config)
    run.close()
    run.close()
    RunDir.resume(run.config).close()


def test_an_unwritable_place_is_named(config, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file"):
        RunDir.create(config, base=tmp_path / "file")


def test_checkpoints_go_where_save_says(config, tmp_path):
    with RunDir.create(config.replace(save=str(tmp_path / "ckpt")), base=tmp_path) as run:
        assert run.checkpoints == tmp_path / "ckpt"
    with RunDir.create(config, base=tmp_path) as run:
        assert run.checkpoints == run.path / "checkpoints"


def test_metrics_are_lines_and_rewound(config, tmp_path, make_trajectory):
    with RunDir.create(config, base=tmp_path) as run:
        for step in range(1, 5):
            run.log_metrics(step, {"rollout/reward": step / 10, "train/kl": float("nan")})
            run.store.write(step - 1, [make_trajectory(step)])
        run.log_metrics(2, {"eval/test/success": 0.5})
    with (run.path / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 5, "rollout/rew')  # the writer was killed here
    with RunDir.resume(run.config) as again:
        again.note_start()
        again.go_on(2)
        lines = list(again.metrics())
        assert [line["step"] for line in lines] == [1, 2], "an evaluation that is not on record is played again"
        assert lines[0]["train/kl"] is None and lines[0]["rollout/reward"] == 0.1
        assert [part.step for part in again.store.parts()] == [0, 1]
        again.log_metrics(3, {"rollout/reward": 0.9})
        assert [line["step"] for line in again.metrics()] == [1, 2, 3]
        assert len(json.loads((again.path / "run.json").read_text())["starts"]) == 2


def test_resume_into_a_new_folder_leaves_the_old_one(config, tmp_path):
    with RunDir.create(config, base=tmp_path) as run:
        run.log_metrics(1, {"rollout/reward": 1.0})
    elsewhere = run.config.replace(load=str(run.path), output_dir=str(tmp_path / "new"))
    with RunDir.create(elsewhere) as again:
        assert again.path == tmp_path / "new" and list(again.metrics()) == []
    assert len(list(read_jsonl(run.path / "metrics.jsonl"))) == 1


def test_tensorboard_without_torch(config, tmp_path):
    code = f"""
import sys
from agentrl.config import Config
from agentrl.data.run_folder import RunDir, new_folder
with RunDir.create(Config(env="search", output_dir={str(tmp_path / "run")!r})) as run:
    run.log_metrics(1, {{"rollout/reward": 0.25, "train/kl": float("inf")}})
    run.log_metrics(2, {{"rollout/reward": 0.5}})
with RunDir.resume(run.config) as run:
    run.go_on(1)
    run.log_metrics(2, {{"rollout/reward": 0.75}})
sys.exit(bool({{"torch", "tensorflow"}} & set(sys.modules)))
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["rollout/reward"]
    assert [(e.step, e.value) for e in events.Scalars("rollout/reward")] == [(1, 0.25), (2, 0.75)]


def test_wandb_only_when_asked_and_clear_when_missing(config, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="pip install wandb"):
        RunDir.create(config.replace(use_wandb=True), base=tmp_path)


def test_reward_curve(config, tmp_path):
    with RunDir.create(config, base=tmp_path) as run:
        assert run.plot_reward().read_bytes().startswith(b"\x89PNG")
        for step in range(1, 4):
            run.log_metrics(step, {"rollout/reward": step / 4})
        run.log_metrics(3, {"eval/test/success": 0.9})
        assert (run.plot_reward().stat().st_size) > 5000


def test_atomic_files_are_whole_or_not_there(tmp_path):
    target = tmp_path / "x"
    target.write_text("old")
    with pytest.raises(RuntimeError), atomic_file(target) as stream:
        stream.write(b"half")
        raise RuntimeError
    assert target.read_text() == "old" and os.listdir(tmp_path) == ["x"]
    with atomic_file(target) as stream:
        stream.write(b"new")
    assert target.read_text() == "new"


@pytest.mark.parametrize("tail", ["", '{"a": 2', "x" * 10_000])
def test_a_torn_tail_is_cut(tmp_path, tail):
    file = tmp_path / "lines.jsonl"
    file.write_text('{"a": 1}\n' + tail)
    assert [line["a"] for line in read_jsonl(file)] == [1]
    lines = JsonLines(file)
    lines.append({"a": 3, "text": "é\ud800\n"})
    lines.close()
    lines.close()
    assert [line["a"] for line in read_jsonl(file)] == [1, 3]


def test_a_file_that_is_one_torn_line(tmp_path):
    file = tmp_path / "lines.jsonl"
    file.write_text("x" * 9000)
    JsonLines(file).close()
    assert file.read_text() == ""


def test_a_bad_line_in_the_middle_is_named(tmp_path):
    file = tmp_path / "lines.jsonl"
    file.write_text('{"a": 1}\n{oops\n{"a": 2}\n')
    with pytest.raises(DataError, match="lines.jsonl:2"):
        list(read_jsonl(file))
    file.write_text("[1]\n")
    with pytest.raises(DataError, match="lines.jsonl:1: expected an object"):
        list(read_jsonl(file))
