"""Checkpoints of a run: complete or not there. Pure Python; what is in them is the callers' business.

::

    checkpoints/
      step_000010/
        manifest.json     sizes and SHA-256 of all other files; written last
        rollout.json      position in the data, account of the tasks
        rollout/          what was played and is not trained on yet (see orchestrator/buffer.py)
        trainer/          weights, optimizer, scheduler, random state (see megatron/state.py)
        hf/               the model in Hugging Face form, for `agentrl eval --run` and `agentrl export`
      latest              the name of the newest checkpoint
      best                step, metric and value of the best one, which is kept beside the newest
      run                 the run that owns the folder, where it is not in the run's own (``--save``)

A checkpoint is built as ``step_000010.tmp``, every file is flushed to the disk, ``latest`` is pointed to it, and then
the folder is renamed: that rename alone makes it one. A kill at any moment leaves the earlier checkpoints as they
were, and left-overs that the next start removes.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from agentrl import jsonl
from agentrl.config.serialize import OWNER, owner_of, read_run_config, run_folder_of
from agentrl.data.files import (
    flush,
    flush_tree,
    lock_file,
    refuse_folders,
    remove_partials,
    storage_errors,
    write_json,
    write_text,
)
from agentrl.errors import AgentRLError, CheckpointError, ConfigError, DataError

log = logging.getLogger(__name__)

FORMAT = 1
MANIFEST = "manifest.json"
ROLLOUT_STATE = "rollout.json"
ROLLOUT_FOLDER = "rollout"
TRAINER_FOLDER = "trainer"
HF_FOLDER = "hf"
LATEST, BEST = "latest", "best"
HASHED_AT_ONCE = 8
_NAME = re.compile(r"step_(\d{6,})")
_LEFT_OVER = re.compile(r"step_\d{6,}\.(tmp|removed)")


class TrainerState(Protocol):
    """The trainer's end: every rank writes into, or reads from, one folder. What is saved for ``later`` is copied, and
    written by :meth:`write`, while the trainer goes on."""

    async def save(self, path: Path, *, later: bool = False) -> None: ...
    async def save_hf(self, path: Path, *, later: bool = False) -> None: ...
    async def write(self) -> None: ...
    async def load(self, path: Path) -> None: ...


class RolloutState(Protocol):
    """The rollouts' end: a JSON-ready dict, and what it writes into a folder of its own."""

    async def state(self, folder: Path) -> dict[str, Any]: ...
    async def load_state(self, state: dict[str, Any], folder: Path) -> None: ...


@dataclass(frozen=True)
class Best:
    """The checkpoint with the best evaluation so far: its step, and the value of the metric that was looked at."""

    step: int
    metric: str
    value: float


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on the disk.

    Attributes:
        step: rollouts trained on.
        passed_over: newer ones that could not be used, each with the reason.
    """

    path: Path
    step: int
    passed_over: tuple[str, ...] = ()

    @property
    def hf_folder(self) -> Path:
        """The model as a Hugging Face folder."""
        return self.path / HF_FOLDER

    async def load(self, *, trainer: TrainerState, rollout: RolloutState) -> None:
        """Put trainer and rollouts where they were."""
        await trainer.load(self.path / TRAINER_FOLDER)
        await rollout.load_state(read_json(self.path / ROLLOUT_STATE), self.path / ROLLOUT_FOLDER)


class CheckpointStore:
    """Writes and finds the checkpoints in one folder.

    Args:
        root: the folder; made at the first save.
        keep_last: newest checkpoints kept; 0 keeps all. The one just written is never removed.
        async_save: :meth:`save` waits for copies, not for the disk.
    """

    def __init__(self, root: str | Path, *, keep_last: int = 0, async_save: bool = False):
        self.root = Path(root)
        self.keep_last = keep_last
        self.async_save = async_save
        self._saving: asyncio.Task[None] | None = None
        self.unsaved: int | None = None
        """The step that trainer and account of tasks have both taken, and of which no save was begun."""

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
        store = cls.of_run(path)
        if which == "newest":
            return store.newest()
        return store.best() if which == "best" else store.open(_name(int(which)))

    @classmethod
    def of_run(cls, path: Path) -> CheckpointStore:
        """The store of a run folder: where its ``--save`` says, else in the run folder; or the folder itself."""
        try:
            save = read_run_config(path).get("save")
        except AgentRLError:
            save = None
        if save:
            return cls(save)
        inner = path / "checkpoints"
        return cls(inner if inner.is_dir() else path)

    def newest(self) -> Checkpoint:
        """The newest checkpoint whose every file is there and has the checksum of its manifest.

        "Newest" is the one written last (``latest``); should that one be damaged, the one before it.

        Raises CheckpointError: none is."""
        refused: list[str] = []
        for step in self._newest_first():
            name = _name(step)
            reason = _damage(self.root / name)
            if reason is None:
                return Checkpoint(self.root / name, step, tuple(refused))
            refused.append(f"{name}: {reason}")
        found = "; ".join(refused) or "no step_* folder in it"
        raise CheckpointError(
            f"no complete checkpoint in {self.root} ({found}). Restore one from a copy, or start a new run"
        )

    def best(self) -> Checkpoint:
        """The checkpoint with the best evaluation so far (``--best-metric``).
        Raises CheckpointError: none was kept, or it is damaged."""
        kept = self.best_so_far()
        if kept is None:
            if (self.root / BEST).exists():
                raise CheckpointError(
                    f"{self.root / BEST} cannot be read; take the newest checkpoint, or one by its number. "
                    "Going on with --load mends it"
                )
            raise CheckpointError(
                f"{self.root} has no best checkpoint: the run was trained without --best-metric, or not evaluated yet. "
                "Take the newest one, or one by its number"
            )
        return self.open(_name(kept.step))

    def best_so_far(self) -> Best | None:
        """What the pointer ``best`` says; None when there is none, or it is damaged: the next evaluation mends it."""
        try:
            values = read_json(self.root / BEST)
            return Best(int(values["step"]), str(values["metric"]), float(values["value"]))
        except (CheckpointError, KeyError, TypeError, ValueError):
            return None

    def open(self, name: str) -> Checkpoint:
        """One checkpoint by its folder name.
        Raises CheckpointError: it is missing or torn; the text names those that are complete."""
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
        """Steps in the order in which they are tried; those after ``latest`` are of a branch that was left."""
        steps = sorted(self.steps(), reverse=True)
        try:
            match = _NAME.fullmatch((self.root / LATEST).read_text(errors="replace").strip())
        except OSError:
            match = None
        if match is None:
            return steps
        return [s for s in steps if s <= int(match[1])] + [s for s in steps if s > int(match[1])]

    # -- whose it is ------------------------------------------------------------------------------

    def refuse_others(self, run: Path | None) -> None:
        """Raises ConfigError when the folder is of another run than ``run`` (None: one whose folder is yet to come)."""
        owner = owner_of(self.root) or run_folder_of(self.root)
        if run is not None and owner is not None and _same(owner, run):
            return
        if owner is not None and (owner / "config.json").is_file():
            raise ConfigError(
                f"--save {self.root} belongs to the run {owner}, whose checkpoints this one would remove as it goes. "
                f"Choose another folder, or continue that run with --load {owner}."
            )
        moved = run is not None and _same(CheckpointStore.of_run(run).root, self.root)
        if not moved and (steps := self.steps()):
            raise ConfigError(
                f"--save {self.root} holds checkpoints of another run (up to step {steps[-1]}), which this one "
                "would remove as it goes. Choose another folder, or continue that run with --load."
            )

    @contextlib.contextmanager
    def held_by(self, run: Path) -> Iterator[None]:
        """For as long as ``run`` goes on, no other run may write here. What a kill left behind is removed.
        Raises ConfigError: the checkpoints are of another run.
        Raises StorageError: another run is writing here, or the folder cannot be written."""
        with contextlib.ExitStack() as stack:
            if not _same(self.root.parent, run) and not _same(self.root, run):  # the run folder has its own lock
                with storage_errors(self.root):
                    self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
                refusal = f"--save {self.root}: another run is writing its checkpoints there. Choose another folder."
                stack.enter_context(lock_file(self.root / ".lock", refusal))
                self.refuse_others(run)
                write_text(self.root / OWNER, f"{run}\n")
            refuse_folders(self.root / LATEST, self.root / BEST)
            with storage_errors(self.root):
                self._sweep()
            yield

    def _sweep(self) -> None:
        """Remove what interrupted saves and removals left: folders of those names only, others are not ours."""
        if self.root.is_dir():
            for left in self.root.iterdir():
                if _LEFT_OVER.fullmatch(left.name) and left.is_dir():
                    shutil.rmtree(left)
            remove_partials(self.root, LATEST, BEST, OWNER)

    # -- writing ----------------------------------------------------------------------------------

    def adopt(self, source: Checkpoint) -> Checkpoint:
        """Have another run's checkpoint as one of these too: its files are linked, or copied to another file system.

        The other run may go on, and remove its own.

        Raises CheckpointError: it went away meanwhile."""
        with storage_errors(self.root):
            building = self.begin(source.step)
            try:
                shutil.copytree(source.path, building, copy_function=_link, dirs_exist_ok=True)
            except (shutil.Error, FileNotFoundError) as error:
                full = next((e for e in _causes(error) if f"[Errno {errno.ENOSPC}]" in e), None)
                if full:
                    raise OSError(errno.ENOSPC, full) from error
                raise CheckpointError(f"checkpoint {source.path} went away while it was taken over") from error
            if reason := _damage(building, deep=False):
                raise CheckpointError(f"checkpoint {source.path} went away while it was taken over: {reason}")
            flush_tree(building)
            return self._put_in_place(source.step)

    def go_on_from(self, step: int) -> None:
        """Make the checkpoint after ``step`` rollouts the newest: a run that went back does not skip ahead again."""
        with storage_errors(self.root):
            write_text(self.root / LATEST, _name(step))

    def mark_best(self, best: Best | None) -> None:
        """Point to a checkpoint that is there as the best so far, or to none; an earlier one is kept no longer."""
        with storage_errors(self.root):
            if best is None:
                (self.root / BEST).unlink(missing_ok=True)
            else:
                write_json(self.root / BEST, asdict(best))

    async def save(self, step: int, *, trainer: TrainerState, rollout: RolloutState) -> None:
        """Write a checkpoint of the whole run as it stands, after the one before it: :meth:`saved` says when it is
        there, without ``async_save`` it is there now.
        Raises StorageError: the disk refuses, or refused the one before it."""
        await self.saved()
        began, self.unsaved = time.monotonic(), None
        with storage_errors(self.root):
            folder = self.begin(step)
            await trainer.save(folder / TRAINER_FOLDER, later=self.async_save)
            await trainer.save_hf(folder / HF_FOLDER, later=self.async_save)
            write_json(folder / ROLLOUT_STATE, await rollout.state(folder / ROLLOUT_FOLDER))
        if self.async_save:
            log.info("copied the state after step %d in %.1f s", step, time.monotonic() - began)
        self._saving = asyncio.create_task(self._complete(step, trainer, began))
        if not self.async_save:
            await self.saved()

    async def _complete(self, step: int, trainer: TrainerState, began: float) -> None:
        """What remains to be done of a save, and needs the run no more."""
        with storage_errors(self.root):
            if self.async_save:
                await trainer.write()
            made = await asyncio.to_thread(self.commit, step)
        log.info("saved %s in %.1f s", made.path, time.monotonic() - began)

    @property
    def saving(self) -> bool:
        """Whether a save is under way."""
        return self._saving is not None and not self._saving.done()

    def check(self) -> None:
        """Raises what the last save failed with, should it have; does not wait for it."""
        if self._saving is not None and self._saving.done():
            self._saving.result()

    async def saved(self) -> None:
        """Wait for the save under way. One that was interrupted meanwhile goes on. Raises what it failed with."""
        if self._saving is not None:
            await asyncio.shield(self._saving)
            self._saving = None

    async def end(self, seconds: float) -> None:
        """The run ends early: the save under way has so long to complete. Its error is only logged."""
        if self._saving is None:
            return
        done, _ = await asyncio.wait([self._saving], timeout=seconds)
        if not done:
            log.error("the checkpoint that was being written was not complete after %.0f s: it is left out", seconds)
            self._saving.cancel()
        elif not self._saving.cancelled() and (error := self._saving.exception()):
            log.error("the checkpoint that was being written is left out: %s", error)

    def begin(self, step: int) -> Path:
        """An empty folder to fill; left-overs of interrupted saves and removals go."""
        self.root.mkdir(parents=True, exist_ok=True)
        self._sweep()
        folder = self.root / f"{_name(step)}.tmp"
        folder.mkdir()
        return folder

    def commit(self, step: int) -> Checkpoint:
        """Make what was filled in since :meth:`begin` a checkpoint, and remove old ones.
        Raises CheckpointError: there is nothing to commit.
        Raises OSError: the disk refused (full, for instance); earlier checkpoints are untouched."""
        building = self.root / f"{_name(step)}.tmp"
        if not building.is_dir():
            raise CheckpointError(f"{building} is not there; call begin({step}) and fill it before commit")
        there = sorted(p for p in building.rglob("*") if p.is_file())
        sums = zip(there, _checksums(there), strict=True)
        listed = {str(p.relative_to(building)): {"size": p.stat().st_size, "sha256": digest} for p, digest in sums}
        flush_tree(building)
        write_json(building / MANIFEST, {"format": FORMAT, "step": step, "files": listed})
        made = self._put_in_place(step)
        self._prune(step)
        return made

    def _put_in_place(self, step: int) -> Checkpoint:
        final = self.root / _name(step)
        replaced = self._set_aside(step) if final.exists() else None  # of a branch that was left
        # Before the rename: as long as there is no such folder, the one before it is the newest.
        write_text(self.root / LATEST, final.name)
        final.with_name(f"{final.name}.tmp").rename(final)
        flush(self.root)
        if replaced is not None:
            shutil.rmtree(replaced)
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
            shutil.rmtree(self._set_aside(step))

    def _set_aside(self, step: int) -> Path:
        # Renamed first, so that an interrupted removal cannot look like a checkpoint.
        doomed = self.root / f"{_name(step)}.removed"
        shutil.rmtree(doomed, ignore_errors=True)
        (self.root / _name(step)).rename(doomed)
        return doomed


def _name(step: int) -> str:
    return f"step_{step:06d}"


def _same(one: Path, other: Path) -> bool:
    return one.resolve() == other.resolve()


def _link(source: str, target: str) -> None:
    """A second name for a file, which is never changed in place; a copy where the file system has no such thing."""
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(source, target)


def _causes(error: Exception) -> list[str]:
    """What went wrong in a ``shutil.copytree``, file by file."""
    return [str(e[2]) for e in error.args[0]] if isinstance(error, shutil.Error) else [str(error)]


def _damage(path: Path, *, deep: bool = True) -> str | None:
    """Why a folder is no complete checkpoint, or None. ``deep`` also reads and checks every byte."""
    manifest = path / MANIFEST
    if not manifest.is_file():
        return f"{MANIFEST} is missing, so it was not finished"
    try:
        contents = json.loads(manifest.read_bytes())
        if contents["format"] != FORMAT:
            return f"its format is {contents['format']}, this version of agentrl reads {FORMAT}"
        listed = {str(name): (file["size"], file["sha256"]) for name, file in contents["files"].items()}
        if ROLLOUT_STATE not in listed:
            return f"{MANIFEST} does not name {ROLLOUT_STATE}"
        for name, (size, _) in listed.items():
            file = path / name
            if not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size != size:
                return f"{name} has {file.stat().st_size} bytes instead of {size}"
        digests = _checksums([path / name for name in listed]) if deep else []
        for name, digest in zip(listed, digests, strict=False):
            if digest != listed[name][1]:
                return f"{name} does not have the checksum it was saved with"
    except (AttributeError, KeyError, OSError, RecursionError, TypeError, ValueError) as error:
        return f"{MANIFEST} or what it names cannot be read ({error!r})"
    return None


def _checksums(files: Sequence[Path]) -> list[str]:
    """SHA-256 of each, several at a time: hashing, not the disk, is what a save of gigabytes waits for."""
    with ThreadPoolExecutor(min(HASHED_AT_ONCE, os.cpu_count() or 1)) as pool:
        return list(pool.map(_sha256, files))


def _sha256(file: Path) -> str:
    with open(file, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a checkpoint. Raises CheckpointError: it is missing, or holds no object."""
    try:
        return jsonl.read_json(path)
    except DataError as error:
        raise CheckpointError(f"{error}; use another checkpoint") from error
