"""Checkpoints on the disk: complete or not there, whatever happens in between."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest

from agentrl.data import checkpoint, files
from agentrl.data.checkpoint import CheckpointStore
from agentrl.errors import CheckpointError, StorageError


class Trainer:
    loaded = None

    async def save(self, path, *, later=False):
        path.mkdir()
        (path / "weights").write_bytes(b"w" * 1000)

    async def write(self): ...

    async def save_hf(self, path, *, later=False):
        path.mkdir()
        (path / "config.json").write_text("{}")

    async def load(self, path):
        self.loaded = (path / "weights").read_bytes()


class Rollout:
    loaded = None

    async def state(self, folder):
        return {"cursor": 7}

    async def load_state(self, state, folder):
        self.loaded = state


def save(store, *steps):
    for step in steps:
        asyncio.run(store.save(step, trainer=Trainer(), rollout=Rollout()))


def folders(root):
    return sorted(p.name for p in root.iterdir())


def test_what_was_saved_is_loaded(tmp_path):
    save(CheckpointStore(tmp_path / "checkpoints"), 5, 10)
    found = CheckpointStore.open_run(tmp_path)
    assert found.step == 10
    assert (found.hf_folder / "config.json").is_file()
    trainer, rollout = Trainer(), Rollout()
    asyncio.run(found.load(trainer=trainer, rollout=rollout))
    assert trainer.loaded == b"w" * 1000
    assert rollout.loaded == {"cursor": 7}
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step_000010"
    manifest = json.loads((found.path / "manifest.json").read_text())
    assert set(manifest["files"]) == {"rollout.json", "trainer/weights", "hf/config.json"}


def test_one_checkpoint_can_be_named(tmp_path):
    save(CheckpointStore(tmp_path / "checkpoints"), 5, 10)
    assert CheckpointStore.open_run(tmp_path / "checkpoints" / "step_000005").step == 5


def tear(kind, folder):
    if kind == "no manifest":
        (folder / "manifest.json").unlink()
    elif kind == "short file":
        (folder / "trainer" / "weights").write_bytes(b"w")
    elif kind == "flipped byte":
        (folder / "trainer" / "weights").write_bytes(b"v" + b"w" * 999)
    elif kind == "missing file":
        (folder / "rollout.json").unlink()
    elif kind == "half a manifest":
        (folder / "manifest.json").write_text('{"format": 1, "fil')


@pytest.mark.parametrize("kind", ["no manifest", "short file", "flipped byte", "missing file", "half a manifest"])
def test_a_torn_checkpoint_gives_way_to_the_one_before(tmp_path, kind):
    store = CheckpointStore(tmp_path / "checkpoints")
    save(store, 5, 10)
    tear(kind, tmp_path / "checkpoints" / "step_000010")
    assert CheckpointStore.open_run(tmp_path).step == 5
    with pytest.raises(CheckpointError, match="use .*step_000005"):
        CheckpointStore.open_run(tmp_path / "checkpoints" / "step_000010")
    tear(kind, tmp_path / "checkpoints" / "step_000005")
    with pytest.raises(CheckpointError, match="no complete checkpoint.*step_000010.*step_000005"):
        CheckpointStore.open_run(tmp_path)


def test_missing_folders_say_so(tmp_path):
    with pytest.raises(CheckpointError, match="no such folder"):
        CheckpointStore.open_run(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"no step_\* folder"):
        CheckpointStore.open_run(tmp_path)
    assert CheckpointStore(tmp_path / "nowhere").newest_step() is None


@pytest.mark.parametrize(("keep", "left"), [(0, [1, 2, 3, 4]), (1, [4]), (3, [2, 3, 4])])
def test_old_checkpoints_go(tmp_path, keep, left):
    store = CheckpointStore(tmp_path, keep_last=keep)
    save(store, 1, 2, 3, 4)
    assert store.steps() == left
    assert store.newest_step() == 4


def test_the_only_good_one_stays_when_a_save_fails(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path, keep_last=1)
    save(store, 1)

    def full(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "flush", full)
    with pytest.raises(StorageError, match="disk is full"):
        save(store, 2)
    monkeypatch.undo()
    assert store.newest().step == 1
    save(store, 3)
    assert folders(tmp_path) == ["latest", "step_000003"]


def test_an_interrupted_save_leaves_no_checkpoint(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 1)
    (store.begin(2) / "part").write_text("x")
    assert store.newest().step == 1
    save(store, 2)
    assert folders(tmp_path) == ["latest", "step_000001", "step_000002"]


def test_saving_a_step_again_replaces_it(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=2)
    save(store, 5, 5)
    assert store.newest().step == 5
    assert folders(tmp_path) == ["latest", "step_000005"]


def test_going_on_from_an_earlier_step_makes_that_branch_the_newest(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=2)
    save(store, 10, 20)
    save(store, 15)
    assert store.newest().step == 15
    assert store.steps() == [10, 15]


def test_several_files_are_hashed_at_once(tmp_path, monkeypatch):
    meeting = threading.Barrier(3, timeout=60)
    digest = checkpoint._sha256

    def met(file):
        meeting.wait()  # nobody goes on before all three files are being hashed
        return digest(file)

    monkeypatch.setattr(checkpoint.os, "cpu_count", lambda: 3)
    monkeypatch.setattr(checkpoint, "_sha256", met)
    store = CheckpointStore(tmp_path)
    save(store, 5)
    assert store.newest().step == 5


def test_commit_without_begin_says_what_to_do(tmp_path):
    with pytest.raises(CheckpointError, match="begin"):
        CheckpointStore(tmp_path).commit(3)


def test_a_run_that_went_back_stays_there_until_it_saves_again(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 2, 4, 6)
    store.go_on_from(2)
    assert CheckpointStore.open_run(tmp_path).step == store.newest_step() == 2
