"""Checkpoints of a run: complete or not there. Pure Python; what is in them is the callers' business.

::

    checkpoints/
      step_000010/
        manifest.json     sizes and SHA-256 of all other files; written last
        rollout.json      position in the data, buffer, tasks in flight
        trainer/          weights, optimizer, scheduler, random state (see megatron/state.py)
        hf/               the model in Hugging Face form, for `agentrl eval --run` and `agentrl export`
      latest              the name of the newest checkpoint
      best                step, metric and value of the best one, which is kept beside the newest

A checkpoint is built as ``step_000010.tmp``, every file is flushed to the disk, the folder is renamed, and only
then ``latest`` is replaced. A kill at any moment leaves the earlier checkpoints as they were, and a
``.tmp`` folder that the next save removes.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from agentrl.data.files import storage_errors
from agentrl.errors import CheckpointError

FORMAT = 1
MANIFEST = "manifest.json"
ROLLOUT_STATE = "rollout.json"
TRAINER_FOLDER = "trainer"
HF_FOLDER = "hf"
BEST = "best"
_NAME = re.compile(r"step_(\d{6,})")


class TrainerState(Protocol):
    """The trainer's end: every rank writes into, or reads from, one folder."""

    async def save(self, path: Path) -> None: ...
    async def load(self, path: Path) -> None: ...
    async def save_hf(self, path: Path) -> None: ...


class RolloutState(Protocol):
    """The rollouts' end: a JSON-ready dict."""

    async def state(self) -> dict[str, Any]: ...
    async def load_state(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Best:
    """The checkpoint with the best evaluation so far: its step, and the value of the metric that was looked at."""

    step: int
    metric: str
    value: float


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on the disk. ``step`` is the number of rollouts trained on."""

    path: Path
    step: int

    @property
    def hf_folder(self) -> Path:
        """The model as a Hugging Face folder."""
        return self.path / HF_FOLDER

    async def load(self, *, trainer: TrainerState, rollout: RolloutState) -> None:
        """Put trainer and rollouts where they were."""
        await trainer.load(self.path / TRAINER_FOLDER)
        await rollout.load_state(read_json(self.path / ROLLOUT_STATE))


class CheckpointStore:
    """Writes and finds the checkpoints in one folder.

    Args:
        root: the folder; made at the first save.
        keep_last: newest checkpoints kept; 0 keeps all. The one just written is never removed.
    """

    def __init__(self, root: str | Path, *, keep_last: int = 0):
        self.root = Path(root)
        self.keep_last = keep_last

    # -- finding ----------------------------------------------------------------------------------

    @classmethod
    def open_run(cls, path: str | Path, *, which: str = "newest") -> Checkpoint:
        """A complete checkpoint of a run folder, or the checkpoint the path itself is.

        Args:
            path: a run folder, its ``checkpoints`` folder, or one ``step_*`` folder.
            which: ``newest``, ``best``, or a number of rollouts; of a ``step_*`` folder, only ``newest`` makes sense.

        Raises:
            CheckpointError: there is none that is complete; the text says which were looked at and why
                each was refused.
        """
        path = Path(path)
        if not path.is_dir():
            raise CheckpointError(f"run folder {path}: no such folder; give a run folder or one of its checkpoints")
        if _NAME.fullmatch(path.name):
            if which != "newest":
                raise CheckpointError(f"{path} is one checkpoint; to choose {which!r}, give the run folder")
            return cls(path.parent).open(path.name)
        store = cls(_folder_of(path))
        if which == "newest":
            return store.newest()
        return store.best() if which == "best" else store.open(_name(int(which)))

    def newest(self) -> Checkpoint:
        """The newest checkpoint whose every file is there and has the checksum of its manifest.

        "Newest" is the one written last (``latest``); should that one be damaged, the highest step.

        Raises:
            CheckpointError: none is.
        """
        refused = []
        for step in self._newest_first():
            name = _name(step)
            reason = _damage(self.root / name)
            if reason is None:
                return Checkpoint(self.root / name, step)
            refused.append(f"{name}: {reason}")
        found = "; ".join(refused) or "no step_* folder in it"
        raise CheckpointError(
            f"no complete checkpoint in {self.root} ({found}). Restore one from a copy, or start a new run"
        )

    def best(self) -> Checkpoint:
        """The checkpoint with the best evaluation so far (``--best-metric``).

        Raises:
            CheckpointError: none was kept, or it is damaged.
        """
        kept = self.best_so_far()
        if kept is None:
            raise CheckpointError(
                f"{self.root} has no best checkpoint: the run was trained without --best-metric, or not evaluated yet. "
                "Take the newest one, or one by its number"
            )
        return self.open(_name(kept.step))

    def best_so_far(self) -> Best | None:
        """What the pointer ``best`` says, or None when there is none.

        Raises:
            CheckpointError: it cannot be read.
        """
        pointer = self.root / BEST
        if not pointer.is_file():
            return None
        values = read_json(pointer)
        try:
            return Best(int(values["step"]), str(values["metric"]), float(values["value"]))
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{pointer} cannot be read ({error!r}); remove it") from error

    def open(self, name: str) -> Checkpoint:
        """One checkpoint by its folder name.

        Raises:
            CheckpointError: it is missing or torn; the text names those that are complete.
        """
        path = self.root / name
        reason = _damage(path) if path.is_dir() else "no such folder"
        match = _NAME.fullmatch(name)
        if reason is None and match:
            return Checkpoint(path, int(match[1]))
        others = [_name(s) for s in sorted(self.steps()) if _name(s) != name and _damage(self.root / _name(s)) is None]
        advice = f"use {self.root / others[-1]}" if others else "no other checkpoint there is complete"
        raise CheckpointError(f"checkpoint {path} cannot be used: {reason}; {advice}")

    def steps(self) -> list[int]:
        """Steps of which there is a folder, complete or not, ascending."""
        if not self.root.is_dir():
            return []
        matches = (_NAME.fullmatch(p.name) for p in self.root.iterdir() if p.is_dir())
        return sorted(int(m[1]) for m in matches if m)

    def newest_step(self) -> int | None:
        """Step of the newest checkpoint that has all its files in full size (contents not read), or None."""
        return next((s for s in self._newest_first() if _damage(self.root / _name(s), deep=False) is None), None)

    def _newest_first(self) -> list[int]:
        pointer = self.root / "latest"
        last = pointer.read_text().strip() if pointer.is_file() else ""
        return sorted(self.steps(), key=lambda step: (_name(step) == last, step), reverse=True)

    # -- writing ----------------------------------------------------------------------------------

    def go_on_from(self, checkpoint: Checkpoint) -> None:
        """Make ``checkpoint`` the newest, if it is one of these: a run that went back does not skip ahead again."""
        if checkpoint.path.parent.resolve() == self.root.resolve() and self.newest_step() != checkpoint.step:
            with storage_errors(self.root):
                write_atomically(self.root / "latest", _name(checkpoint.step))

    def mark_best(self, best: Best | None) -> None:
        """Point to a checkpoint that is there as the best so far, or to none; an earlier one is kept no longer."""
        with storage_errors(self.root):
            if best is None:
                (self.root / BEST).unlink(missing_ok=True)
            else:
                write_atomically(self.root / BEST, json.dumps(asdict(best)))

    async def save(self, step: int, *, trainer: TrainerState, rollout: RolloutState) -> Checkpoint:
        """Write a checkpoint of the whole run."""
        with storage_errors(self.root):
            folder = self.begin(step)
            await trainer.save(folder / TRAINER_FOLDER)
            await trainer.save_hf(folder / HF_FOLDER)
            write_json(folder / ROLLOUT_STATE, await rollout.state())
            return await asyncio.to_thread(self.commit, step)

    def begin(self, step: int) -> Path:
        """An empty folder to fill; left-overs of interrupted saves and removals go."""
        self.root.mkdir(parents=True, exist_ok=True)
        for left in self.root.iterdir():
            if left.name.endswith((".tmp", ".removed")):
                shutil.rmtree(left) if left.is_dir() else left.unlink()
        folder = self.root / f"{_name(step)}.tmp"
        folder.mkdir()
        return folder

    def commit(self, step: int) -> Checkpoint:
        """Make what was filled in since :meth:`begin` a checkpoint, and remove old ones.

        Raises:
            CheckpointError: there is nothing to commit.
            OSError: the disk refused (full, for instance); earlier checkpoints are untouched.
        """
        building = self.root / f"{_name(step)}.tmp"
        if not building.is_dir():
            raise CheckpointError(f"{building} is not there; call begin({step}) and fill it before commit")
        files = {}
        for file in sorted(p for p in building.rglob("*") if p.is_file()):
            flush(file)
            files[str(file.relative_to(building))] = {"size": file.stat().st_size, "sha256": _sha256(file)}
        write_json(building / MANIFEST, {"format": FORMAT, "step": step, "files": files})
        for folder in (building, *(p for p in building.rglob("*") if p.is_dir())):
            flush(folder)
        final = self.root / _name(step)
        if final.exists():
            self._remove(step)
        building.rename(final)
        flush(self.root)
        write_atomically(self.root / "latest", _name(step))
        self._prune(step)
        return Checkpoint(final, step)

    def _prune(self, newest: int) -> None:
        if self.keep_last < 1 or _damage(self.root / _name(newest), deep=False) is not None:
            return
        # Steps beyond the one just written are of an earlier attempt that --load went back from.
        older = [s for s in self.steps() if s != newest]
        abandoned = [s for s in older if s > newest]
        best = self.best_so_far()
        outdated = [s for s in older if s < newest and (best is None or s != best.step)]
        for step in abandoned + outdated[: -(self.keep_last - 1) or None]:
            self._remove(step)

    def _remove(self, step: int) -> None:
        # Renamed first, so that an interrupted removal cannot look like a checkpoint.
        doomed = self.root / f"{_name(step)}.removed"
        shutil.rmtree(doomed, ignore_errors=True)
        (self.root / _name(step)).rename(doomed)
        shutil.rmtree(doomed)


def _folder_of(run: Path) -> Path:
    """Where a run's checkpoints are: where its ``--save`` says, else in the run folder; or the folder itself."""
    config = run / "config.json"
    save = read_json(config).get("save") if config.is_file() else None
    if save:
        return Path(save)
    inner = run / "checkpoints"
    return inner if inner.is_dir() else run


def _name(step: int) -> str:
    return f"step_{step:06d}"


def _damage(path: Path, *, deep: bool = True) -> str | None:
    """Why a folder is no complete checkpoint, or None. ``deep`` also reads and checks every byte."""
    manifest = path / MANIFEST
    if not manifest.is_file():
        return f"{MANIFEST} is missing, so it was not finished"
    try:
        contents = json.loads(manifest.read_text())
        listed, version = contents["files"], contents["format"]
    except (json.JSONDecodeError, KeyError, TypeError, UnicodeDecodeError) as error:
        return f"{MANIFEST} cannot be read ({error})"
    if version != FORMAT:
        return f"its format is {version}, this version of agentrl reads {FORMAT}"
    for name, expected in listed.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != expected["size"]:
            return f"{name} has {file.stat().st_size} bytes instead of {expected['size']}"
        if deep and _sha256(file) != expected["sha256"]:
            return f"{name} does not have the checksum it was saved with"
    return None


def _sha256(file: Path) -> str:
    with open(file, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def read_json(path: Path) -> Any:
    """Contents of a JSON file.

    Raises:
        CheckpointError: it is missing or not JSON.
    """
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); use another checkpoint") from error


def write_json(path: Path, value: Any) -> None:
    """Write JSON and flush it to the disk. NaN and infinity are refused."""
    path.write_text(json.dumps(value, indent=1, allow_nan=False))
    flush(path)


def write_atomically(path: Path, text: str) -> None:
    """Replace a small file in one step."""
    beside = path.with_name(path.name + ".tmp")
    beside.write_text(text)
    flush(beside)
    os.replace(beside, path)
    flush(path.parent)


def flush(path: Path) -> None:
    """Have the disk keep a file's or folder's contents."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
