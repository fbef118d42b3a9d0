"""``--load``: forks, folders of checkpoints elsewhere, what a kill left undone, and damage of every kind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl.cli.main import main
from agentrl.config import load_config
from agentrl.data.checkpoint import CheckpointStore
from agentrl.data.run_folder import RunDir
from agentrl.errors import AgentRLError, CheckpointError, ConfigError, LostError, StorageError
from agentrl.orchestrator import launch as driver
from tests.orchestrator.scripted import FLAGS, Rollout, Trainer, check_run, lines, train  # noqa: F401

EVERY_STEP = ("--save-interval", "1", "--eval-interval", "1", "--keep-last", "2")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture
def run(tmp_path: Path, train: Any) -> Path:  # noqa: F811
    """A run of two steps with its checkpoints in ``STORE``, and an export."""
    folder = tmp_path / "run"
    train(*FLAGS, *EVERY_STEP, "--num-rollout", "2", "--keep-last", "0", "--output-dir", str(folder),
          "--save", str(tmp_path / "STORE"), "--save-hf", str(tmp_path / "model"))  # fmt: skip
    return folder


def test_a_dry_run_leaves_the_folder_alone_whoever_has_it(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def state() -> dict[str, tuple[int, int]]:
        return {str(p.relative_to(run)): (p.stat().st_mtime_ns, p.stat().st_size) for p in run.rglob("*")}

    left = run / ".metrics.jsonl.1.partial"  # as of a kill, or of a write under way
    left.touch()
    (run / ".lock").unlink()
    before = state()
    assert main(["train", "--load", str(run), "--num-rollout", "4", "--dry-run"]) == 0
    assert state() == before
    with RunDir(run, load_config(["--env", "search"])):
        before = state()
        assert main(["train", "--load", str(run), "--num-rollout", "4", "--dry-run"]) == 0
        assert state() == before
    assert f"goes on from     {run.parent / 'STORE'}" in capsys.readouterr().out


# -- whose checkpoints -------------------------------------------------------------------------------


def test_a_fork_owns_its_checkpoints_and_leaves_the_others_alone(tmp_path: Path, run: Path, train: Any) -> None:  # noqa: F811
    store, model = contents(tmp_path / "STORE"), contents(tmp_path / "model")
    fork = tmp_path / "fork"
    train("--load", str(run), "--output-dir", str(fork), "--keep-last", "1", "--num-rollout", "4")
    assert contents(tmp_path / "STORE") == store and contents(tmp_path / "model") == model
    check_run(fork, 4, first=2)
    assert CheckpointStore(fork / "checkpoints").steps() == [4]
    assert json.loads((fork / "run.json").read_text())["forked_from"]["step"] == 2
    check_run(run, 2, checkpoints=tmp_path / "STORE")


def test_a_fork_has_a_checkpoint_before_its_first_step(tmp_path: Path, run: Path, train: Any, monkeypatch: Any) -> None:  # noqa: F811
    def killed(*args: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(driver, "start_actors", killed)
        with pytest.raises(KeyboardInterrupt):
            train("--load", str(run), "--output-dir", str(tmp_path / "fork"), "--num-rollout", "3")
    shutil.rmtree(run)
    shutil.rmtree(tmp_path / "STORE")
    train("--load", str(tmp_path / "fork"))
    check_run(tmp_path / "fork", 3, first=2)


def test_a_fork_of_a_run_that_goes_on(tmp_path: Path, run: Path, train: Any, monkeypatch: Any) -> None:  # noqa: F811
    """Its checkpoint is removed while it is being taken over: then the newer one is taken."""
    adopt, went = CheckpointStore.adopt, []

    def while_the_other_prunes(self: CheckpointStore, source: Any) -> Any:
        if not went:
            went.append(source.step)
            source.path.rename(source.path.with_name("step_000003"))
        return adopt(self, source)

    monkeypatch.setattr(CheckpointStore, "adopt", while_the_other_prunes)
    held = RunDir.resume(load_config(["--load", str(run)]))
    train("--load", str(run), "--output-dir", str(tmp_path / "fork"), "--num-rollout", "4")
    held.close()
    assert went == [2] and lines(tmp_path / "fork" / "metrics.jsonl")[-1]["step"] == 4


def test_another_runs_store_is_refused_with_one_sentence(tmp_path: Path, run: Path, train: Any) -> None:  # noqa: F811
    before = contents(tmp_path / "STORE")
    elsewhere = ("--output-dir", str(tmp_path / "other"), "--num-rollout", "9", "--save", str(tmp_path / "STORE"))
    for flags in (["--load", str(run)], FLAGS):
        with pytest.raises(ConfigError, match=f"STORE belongs to the run {run}.*continue that run with --load {run}"):
            train(*flags, *elsewhere)
    assert contents(tmp_path / "STORE") == before and not (tmp_path / "other").exists()


def test_one_run_at_a_time_writes_a_store(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    second.mkdir()
    store = CheckpointStore(tmp_path / "STORE")
    with store.held_by(first), pytest.raises(StorageError, match="another run is writing"), store.held_by(second):
        raise AssertionError
    assert (tmp_path / "STORE").stat().st_mode & 0o777 == 0o700


def test_checkpoints_may_be_saved_elsewhere_from_now_on(tmp_path: Path, run: Path, train: Any) -> None:  # noqa: F811
    train("--load", str(run), "--save", str(tmp_path / "NEW"), "--num-rollout", "3")
    check_run(run, 3, checkpoints=tmp_path / "NEW")


@pytest.mark.parametrize("named", ["STORE", "STORE/step_000001", "run"])
def test_a_store_knows_its_run(tmp_path: Path, run: Path, train: Any, named: str) -> None:  # noqa: F811
    train("--load", str(tmp_path / named), "--num-rollout", "3")
    check_run(run, 3, checkpoints=tmp_path / "STORE")


def test_a_run_that_was_moved_keeps_its_store(tmp_path: Path, run: Path, train: Any) -> None:  # noqa: F811
    run.rename(tmp_path / "moved")
    train("--load", str(tmp_path / "moved"), "--num-rollout", "3")
    check_run(tmp_path / "moved", 3, checkpoints=tmp_path / "STORE")


def test_a_save_removes_nothing_of_strangers(tmp_path: Path) -> None:
    for name in ("thesis.tmp", "old.removed", "step_1.tmp", ".x.1.partial"):
        (tmp_path / name).mkdir()
    for name in ("notes.tmp", "step_000001.tmp.txt"):
        (tmp_path / name).touch()
    (tmp_path / "step_000004.removed").mkdir()
    before = set(p.name for p in tmp_path.iterdir())
    CheckpointStore(tmp_path).begin(5)
    after = set(p.name for p in tmp_path.iterdir())
    assert before - after == {"step_000004.removed"} and after - before == {"step_000005.tmp"}


# -- beginning ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["--save", "--output-dir"])
def test_one_command_starts_and_goes_on(tmp_path: Path, train: Any, flag: str) -> None:  # noqa: F811
    folder = tmp_path / "ck"
    command = [*FLAGS, *EVERY_STEP, "--load", str(folder), flag, str(folder)]
    if flag == "--save":
        command += ["--output-dir", str(tmp_path / "run")]
    train(*command, "--num-rollout", "1")
    train(*command, "--num-rollout", "3")
    check_run(tmp_path / "run" if flag == "--save" else folder, 3, checkpoints=folder if flag == "--save" else None)


def test_one_command_goes_on_before_anything_was_saved(tmp_path: Path, train: Any, monkeypatch: Any) -> None:  # noqa: F811
    def killed(*args: Any) -> Any:
        raise KeyboardInterrupt

    run = tmp_path / "run"
    command = [*FLAGS, *EVERY_STEP, "--num-rollout", "2", "--output-dir", str(run)]
    command += ["--load", str(run / "ck"), "--save", str(run / "ck")]
    with monkeypatch.context() as patch:
        patch.setattr(driver, "start_actors", killed)
        with pytest.raises(KeyboardInterrupt):
            train(*command)
    train(*command)
    check_run(run, 2, checkpoints=run / "ck")


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such run folder or checkpoint.*give --save .*nowhere too"):
        load_config([*FLAGS, "--load", str(tmp_path / "nowhere"), "--save", str(tmp_path / "elsewhere")])


def test_a_run_killed_before_its_first_save_begins_again(tmp_path: Path, train: Any, monkeypatch: Any) -> None:  # noqa: F811
    async def killed(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    folder = tmp_path / "run"
    command = [*FLAGS, "--save-interval", "2", "--eval-interval", "1", "--num-rollout", "2"]
    command += ["--output-dir", str(folder)]
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointStore, "save", killed)
        with pytest.raises(KeyboardInterrupt):
            train(*command)
    with pytest.raises(ConfigError, match="holds a run already. Continue it with --load"):
        train(*command)
    train("--load", str(folder))
    check_run(folder, 2)


def test_checkpoints_that_are_gone_are_no_reason_to_begin_again(tmp_path: Path, run: Path, train: Any) -> None:  # noqa: F811
    before = contents(run)
    shutil.rmtree(tmp_path / "STORE")
    with pytest.raises(CheckpointError, match="has done 2 rollouts: they are gone"):
        train("--load", str(run), "--num-rollout", "9")
    assert contents(run) == before


# -- the end -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["evaluation", "export", "report"])
def test_what_a_kill_left_undone_is_done(tmp_path: Path, train: Any, monkeypatch: Any, when: str) -> None:  # noqa: F811
    evaluate, save_hf = Rollout.evaluate, Trainer.save_hf

    async def evaluate_first_only(self: Rollout, step: int, **kwargs: Any) -> Any:
        return await (stop() if step else evaluate(self, step, **kwargs))

    async def export(self: Trainer, path: Path, **how: bool) -> None:
        await (stop() if path.name == "model" else save_hf(self, path, **how))

    async def stop() -> None:
        raise KeyboardInterrupt

    def plot_reward(self: RunDir) -> None:
        raise KeyboardInterrupt

    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        if when == "evaluation":
            patch.setattr(Rollout, "evaluate", evaluate_first_only)
        elif when == "export":
            patch.setattr(Trainer, "save_hf", export)
        else:
            patch.setattr(RunDir, "plot_reward", plot_reward)
        with pytest.raises(KeyboardInterrupt):
            train(*FLAGS, "--save-interval", "2", "--eval-interval", "2", "--num-rollout", "2", "--output-dir",
                  str(folder), "--save-hf", str(tmp_path / "model"))  # fmt: skip
    train("--load", str(folder))
    check_run(folder, 2, every=2)
    assert (tmp_path / "model" / "model.safetensors").is_file()
    with pytest.raises(ConfigError, match="nothing is left to train"):
        train("--load", str(folder))


def test_a_run_that_is_done_exports_without_starting_anything(tmp_path: Path, run: Path, train: Any) -> None:  # noqa: F811
    assert train("--load", str(run), "--save-hf", str(tmp_path / "other")) is None
    assert contents(tmp_path / "other") == contents(tmp_path / "model")


def test_an_evaluation_is_on_record_once(tmp_path: Path, run: Path, train: Any) -> None:  # noqa: F811
    metrics = run / "metrics.jsonl"
    kept = metrics.read_text().splitlines()
    assert "eval/search/success" in kept[-1]
    metrics.write_text("\n".join(kept[:-1]) + "\n")  # as if it had been killed between the two files
    rollout = train("--load", str(run), "--num-rollout", "3")
    assert rollout.evaluated == [3]
    check_run(run, 3, checkpoints=tmp_path / "STORE")


def test_a_start_that_fails_has_changed_nothing(tmp_path: Path, run: Path, train: Any, monkeypatch: Any) -> None:  # noqa: F811
    def fails(*args: Any) -> Any:
        raise AgentRLError("no engine")

    before, store = contents(run), contents(tmp_path / "STORE")
    monkeypatch.setattr(driver, "start_actors", fails)
    with pytest.raises(AgentRLError, match="no engine"):
        train("--load", str(tmp_path / "STORE" / "step_000001"))
    for name in ("config.json", "run.json", "logs/driver.log"):
        before.pop(name)
    after = contents(run)
    assert {name: after[name] for name in before} == before and contents(tmp_path / "STORE") == store


# -- damage ------------------------------------------------------------------------------------------

WRONG: dict[str, Callable[[Path], Any]] = {
    "missing": lambda file: file.unlink(),
    "empty": lambda file: file.write_bytes(b""),
    "garbage": lambda file: file.write_bytes(b"\xff\xfe\x80garbage\n" * 3),
    "NULs": lambda file: file.write_bytes(b"\0" * 64 + b"\n"),
    "a list": lambda file: file.write_text("[1, 2]\n"),
    "no keys": lambda file: file.write_text("{}\n"),
    "wrong types": lambda file: file.write_text(
        '{"files": [], "format": 1, "starts": 3, "step": "x", "sets": [], "metric": [], "rollout_batch_size": {}}\n'
    ),
    "torn": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "a torn line": lambda file: file.write_bytes(b'{"step": 1, "roll\n' + file.read_bytes()),
    "deep": lambda file: file.write_text("[" * 100_000 + "\n"),
    "a folder": lambda file: (file.unlink(), file.mkdir()),
}
FILES = (
    "failed_tasks.json",
    "latest", "best", "run.json", "config.json", "metrics.jsonl", "evaluations.jsonl", "run",
    "step_000002/manifest.json", "step_000002/rollout.json", "step_000002/trainer/weights.json",
)  # fmt: skip


@pytest.mark.parametrize("file", FILES)
def test_damage(tmp_path: Path, train: Any, file: str, capsys: Any) -> None:  # noqa: F811
    """The newest good state is used, and that is said; or one sentence tells what to do. Never another error."""
    whole, folder = tmp_path / "whole", tmp_path / "run"
    train(*FLAGS, *EVERY_STEP, "--best-metric", "eval/search/success", "--num-rollout", "2", "--keep-last", "0",
          "--output-dir", str(whole))  # fmt: skip
    inside = file.startswith("step_") or file in ("latest", "best", "run")
    for kind, damage in WRONG.items():
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(whole, folder)
        target = folder / "checkpoints" / file if inside else folder / file
        if file in ("run", "failed_tasks.json"):  # there only where the checkpoints are elsewhere, a task failed
            target.touch()
        damage(target)
        capsys.readouterr()
        try:
            train("--load", str(folder), "--num-rollout", "3")
        except (CheckpointError, ConfigError, StorageError) as error:
            sentence = str(error)
            assert Path(file).name in sentence or "config.json" in sentence, (kind, sentence)
            assert "Traceback" not in sentence
            assert file == "config.json" or kind == "a folder", (kind, sentence)
            continue
        said = capsys.readouterr().out
        metrics = lines(folder / "metrics.jsonl")
        assert metrics[-1]["step"] == 3, kind
        assert CheckpointStore(folder / "checkpoints").newest().step == 3, kind
        if file.startswith("step_"):
            assert "passed over step_000002" in said and "step 2: reward" in said, (kind, said)
            check_run(folder, 3)
        if file == "run.json" or (file.endswith("jsonl") and kind not in ("missing", "empty", "torn")):
            assert file in said, (kind, said)
        if file in ("latest", "best", "run", "run.json", "evaluations.jsonl", "failed_tasks.json"):
            assert [m["step"] for m in metrics if "train/grad_norm" in m] == [1, 2, 3], kind


# -- by itself ---------------------------------------------------------------------------------------


class Told:
    """An attempt of a supervised run, and what it told."""

    number, began = 1, 0.0

    def __init__(self) -> None:
        self.facts: list[dict[str, Any]] = []

    def tell(self, **facts: Any) -> None:
        self.facts.append(facts)

    @property
    def now(self) -> dict[str, Any]:
        return {name: value for facts in self.facts for name, value in facts.items()}


def test_a_supervisor_is_told_how_to_go_on_until_all_is_done(tmp_path: Path, train: Any, monkeypatch: Any) -> None:  # noqa: F811
    run, attempt = tmp_path / "run", Told()
    flags = [*FLAGS, *EVERY_STEP, "--num-rollout", "3", "--output-dir", str(run)]

    def lost(*args: Any) -> Any:
        raise LostError("rank 0 died")

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "publish", lost)
        with pytest.raises(LostError):
            driver.train(load_config(flags), attempt)
    assert attempt.now == {"run": str(run), "load": str(run), "start": 0, "open": True}

    assert driver.train(load_config(["--load", attempt.now["load"]]), attempt) == 0
    assert attempt.now["done"] and attempt.now["load"] == str(run)
    check_run(run, 3)


def test_a_run_told_to_go_back_goes_back_also_after_a_fault_before_it_did(
    tmp_path: Path,
    run: Path,
    train: Any,  # noqa: F811
    monkeypatch: Any,
) -> None:
    back, attempt = str(tmp_path / "STORE" / "step_000001"), Told()

    def killed(*args: Any) -> Any:
        raise LostError("rank 0 died")

    with monkeypatch.context() as patch:
        patch.setattr(driver, "start_actors", killed)
        with pytest.raises(LostError):
            driver.train(load_config(["--load", back, "--num-rollout", "4"]), attempt)
    assert attempt.now["load"] == back
    driver.train(load_config(["--load", attempt.now["load"]]), attempt)
    assert attempt.facts[-2:] == [{"load": str(run)}, {"done": True}]
    check_run(run, 4, checkpoints=tmp_path / "STORE")


def test_a_supervised_run_that_lost_a_part_does_not_say_what_to_type(
    tmp_path: Path,
    train: Any,  # noqa: F811
    monkeypatch: Any,
    capsys: Any,
) -> None:
    errors: list[Exception] = [LostError("rank 0 died"), AgentRLError("an author's mistake")]
    for number, error in enumerate(errors):

        def fail(*args: Any, error: Exception = error) -> Any:
            raise error

        monkeypatch.setattr(Trainer, "publish", fail)
        with pytest.raises(type(error)):
            driver.train(load_config([*FLAGS, "--output-dir", str(tmp_path / str(number))]), Told())
        assert ("agentrl train --load" in capsys.readouterr().out) == bool(number)
