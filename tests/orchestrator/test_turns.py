"""Whose turn it is on devices that trainer and engines share."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.config import load_config
from agentrl.errors import AgentRLError
from agentrl.orchestrator.loop import save_before_leaving
from agentrl.orchestrator.turns import Turns
from tests.orchestrator.scripted import FLAGS, Rollout, Trainer, check_run, train  # noqa: F401

TRAINER = ("begin", "ready", "infer", "update", "publish", "save", "load", "save_hf", "release_memory", "resume_memory")
ROLLOUT = ("start", "generate", "evaluate", "update_weights", "release_memory")
RUN = (*FLAGS, "--num-rollout", "2", "--eval-interval", "2", "--save-interval", "1", "--colocate")


class Side:
    """Answers every call, writes it down, and fails the next one of a name in ``broken``."""

    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name, self.broken = log, name, set[str]()

    def __getattr__(self, method: str) -> Any:
        async def call(*args: Any, **kwargs: Any) -> dict[str, float]:
            self.log.append(f"{self.name} {method}")
            if method in self.broken:
                self.broken.remove(method)
                raise AgentRLError("broken on purpose")
            return {"time/sync": 1.0}

        return call


def turns(*flags: str) -> tuple[Turns, list[str], Side, Side]:
    log: list[str] = []
    trainer, engines = Side(log, "trainer"), Side(log, "engines")
    return Turns(load_config(["--env", "search", *flags]), trainer, engines), log, trainer, engines  # type: ignore[arg-type]


async def test_each_side_gives_its_memory_back_before_the_other_takes_it() -> None:
    whose, log, *_ = turns("--colocate")
    metrics = await whose.trainer() | await whose.trainer()
    assert log == [f"{s} {m}" for s, m in (("engines", "release_memory"), ("trainer", "begin"), ("trainer", "ready"),
                                           ("trainer", "resume_memory"))]  # fmt: skip
    log.clear()
    metrics |= await whose.engines("version 0")  # type: ignore[arg-type]
    assert log == ["trainer release_memory", "engines update_weights"]
    assert set(metrics) == {"time/engines_release", "time/trainer_resume", "time/trainer_release", "time/sync"}
    assert await whose.engines() == {}, "it is their turn"
    log.clear()
    await whose.trainer()
    await whose.engines()
    assert log[-2:] == ["trainer release_memory", "engines update_weights"], "the weights of before: theirs are gone"
    assert "trainer begin" not in log, "once"


async def test_without_colocate_nobody_waits() -> None:
    whose, log, *_ = turns()
    assert await whose.trainer() == {} and await whose.engines() == {} and log == []
    await whose.engines("version 0")  # type: ignore[arg-type]
    assert log == ["engines update_weights"]


@pytest.mark.parametrize(("flag", "left_out"), [("--no-offload-train", "trainer"), ("--no-offload-rollout", "engines")])
async def test_a_side_that_is_not_offloaded_keeps_its_memory(flag: str, left_out: str) -> None:
    whose, log, *_ = turns("--colocate", flag)
    await whose.trainer()
    await whose.engines("version 0")  # type: ignore[arg-type]
    assert not {f"{left_out} release_memory", f"{left_out} resume_memory"} & set(log)
    assert "engines update_weights" in log


async def test_a_move_that_was_broken_off_is_made_from_its_beginning() -> None:
    whose, log, trainer, _ = turns("--colocate")
    trainer.broken = {"ready"}
    with pytest.raises(AgentRLError, match="on purpose"):
        await whose.trainer()
    log.clear()
    await whose.trainer()
    assert log == ["engines release_memory", "trainer ready", "trainer resume_memory"]
    trainer.broken = {"release_memory"}
    with pytest.raises(AgentRLError, match="on purpose"):
        await whose.engines("version 0")  # type: ignore[arg-type]
    log.clear()
    await whose.trainer()  # a last checkpoint
    assert log == ["engines release_memory", "trainer ready", "trainer resume_memory"]


async def test_engines_have_no_turn_before_there_are_weights() -> None:
    whose, *_ = turns("--colocate")
    await whose.trainer()
    with pytest.raises(AgentRLError, match="nothing was published"):
        await whose.engines()


async def test_a_run_that_is_asked_to_end_saves_in_the_trainers_turn() -> None:
    whose, log, trainer, engines = turns("--colocate")
    await whose.trainer()
    await whose.engines("version 0")  # type: ignore[arg-type]
    log.clear()
    store: Any = Side(log, "checkpoints")
    store.unsaved = 1
    with pytest.raises(asyncio.CancelledError):
        async with save_before_leaving(
            load_config(["--env", "search"]), SimpleNamespace(has_lost=False), trainer=trainer, rollout=engines,
            checkpoints=store, progress=SimpleNamespace(stage=lambda text: None), seconds=10, turns=whose,
        ):  # type: ignore[arg-type]  # fmt: skip
            raise asyncio.CancelledError
    assert log == ["engines release_memory", "trainer ready", "trainer resume_memory", "checkpoints save"]


def test_in_a_run_nobody_works_in_the_turn_of_the_other(tmp_path: Path, train: Any, monkeypatch: Any) -> None:  # noqa: F811
    """Of a new run, of one that goes on, and to the export at its end."""
    calls: list[str] = []

    def watched(kind: type, name: str) -> None:
        original = getattr(kind, name, None)

        async def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(f"{kind.__name__} {name}")
            await asyncio.sleep(0)
            return await original(self, *args, **kwargs) if original else {}

        monkeypatch.setattr(kind, name, call, raising=False)

    for kind, names in ((Trainer, TRAINER), (Rollout, ROLLOUT)):
        for name in names:
            watched(kind, name)
    folder = tmp_path / "run"
    train("--output-dir", str(folder), *RUN, "--save-hf", str(tmp_path / "model"))
    check_run(folder, 2, every=2)
    assert calls[:6] == [
        *("Rollout start", "Rollout evaluate", "Rollout release_memory"),
        *("Trainer begin", "Trainer ready", "Trainer resume_memory"),
    ]
    assert alternate(calls) == "engines"
    assert calls[-2:] == ["Trainer resume_memory", "Trainer save_hf"]
    calls.clear()
    train("--load", str(folder), "--num-rollout", "3", "--update-weights-interval", "2")
    assert (folder / "checkpoints" / "step_000003").is_dir()
    assert calls[:5] == [
        *("Rollout start", "Rollout release_memory", "Trainer begin", "Trainer ready", "Trainer resume_memory")
    ]
    assert calls[5] == "Trainer load"
    alternate(calls)


def alternate(calls: list[str]) -> str:
    """Checks that work is done by the side whose turn it is; who began."""
    memory = {"engines": True, "trainer": False}
    for call in calls:
        kind, method = call.split()
        side = "engines" if kind == "Rollout" else "trainer"
        if method in ("release_memory", "resume_memory", "ready", "begin", "update_weights"):
            memory[side] = method != "release_memory"
            assert sum(memory.values()) < 2, (call, calls)
        else:
            assert memory[side], (call, calls)
    return "engines"
