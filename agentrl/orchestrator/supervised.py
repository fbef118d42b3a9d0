"""Supervised fine-tuning: batches of written conversations, or of a run's stored trajectories, in place of rollouts.

Nothing is played: no engine, no router and no rollout manager. The driver makes the batches; ranks, checkpoints, run
folder and metrics are those of every training.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from rich.text import Text

from agentrl.algorithms import TrainBatch, load_algorithm, trainable
from agentrl.config.schema import AlgorithmOptions
from agentrl.config.serialize import read_run_config
from agentrl.data.account import TaskAccount
from agentrl.data.episodes import by_episode, reward_of, solved
from agentrl.data.store import TrajectoryStore
from agentrl.errors import AgentRLError, ConfigError, DataError, EnvError
from agentrl.orchestrator.loop import due, saved, spoken
from agentrl.orchestrator.notices import Lasting, steps_left_out
from agentrl.progress import Progress, clock
from agentrl.rollout.options import open_chat
from agentrl.rollout.written import Writer
from agentrl.tasks.chats import read_chats
from agentrl.tasks.source import TaskSource
from agentrl.types import Group, Segment, Task, Trajectory, replace

if TYPE_CHECKING:
    from agentrl.config.schema import Config
    from agentrl.data.checkpoint import CheckpointStore
    from agentrl.data.run_folder import RunDir
    from agentrl.orchestrator.handles import TrainerHandle

log = logging.getLogger(__name__)

HELD_OUT = "eval/nll"
"""Metric: the loss of ``--eval-data``."""


class Examples(Protocol):
    """What is learned, by number. ``ids`` are the same wherever the same is learned."""

    ids: list[str]

    def segments(self, number: int) -> list[Segment]:
        """Its tokens, mask 1 where they are learned. Raises DataError that says where it stands."""


class WrittenChats:
    """The conversations of ``--train-data`` or ``--eval-data``, in the model's chat template."""

    def __init__(self, cfg: Config, source: str):
        self._chats = read_chats(source)
        self._writer = Writer(open_chat(cfg, str(cfg.hf_checkpoint)))
        self.ids = [chat.chat_id for chat in self._chats]

    def segments(self, number: int) -> list[Segment]:
        chat = self._chats[number]
        try:
            return self._writer.segments(chat.messages, chat.tools)
        except EnvError as error:
            raise DataError(f"{chat.place}: {error}") from None


class StoredTrajectories:
    """The trajectories of ``--sft-from`` whose episode succeeded, or earned ``--sft-min-reward``: the very tokens that
    the policy sampled, in the order of their rollouts.

    Raises:
        DataError: there are none, or a file is torn.
        ConfigError: the run's model had other tokens.
    """

    def __init__(self, cfg: Config):
        run, least = Path(str(cfg.sft_from)), cfg.sft_min_reward
        refuse_other_tokens(cfg, run)
        self.ids: list[str] = []
        self._segments: list[list[Segment]] = []
        episodes, best = 0, -math.inf
        store = TrajectoryStore(run / "trajectories", read_only=True)
        for part in store.parts("train"):
            for episode in by_episode(filter(trainable, store.read("train", step=part.step))):
                episodes, best = episodes + 1, max(best, reward_of(episode))
                if not (solved(episode) if least is None else reward_of(episode) >= least):
                    continue
                for trajectory in episode:
                    self.ids.append(f"{part.step}/{trajectory.trajectory_id}")
                    self._segments.append(trajectory.segments)
        if not self.ids:
            wanted = "solved its task" if least is None else f"earned --sft-min-reward {least:g}"
            found = f"{episodes} that were trained on, the best reward is {best:g}" if episodes else "none at all"
            raise DataError(f"--sft-from {run}: no stored episode of training {wanted}; there are {found}.")

    def segments(self, number: int) -> list[Segment]:
        return self._segments[number]


def refuse_other_tokens(cfg: Config, run: Path) -> None:
    """Raises ConfigError where the run's model has another tokenizer: its ids would mean other words."""
    try:
        theirs = Path(str(read_run_config(run).get("hf_checkpoint"))) / "tokenizer.json"
    except AgentRLError:
        return
    ours = Path(str(cfg.hf_checkpoint)) / "tokenizer.json"
    if theirs.is_file() and ours.is_file() and theirs.read_bytes() != ours.read_bytes():
        raise ConfigError(
            f"--sft-from {run} holds tokens of {theirs.parent}, and --hf-checkpoint {ours.parent} has another "
            "tokenizer.json: they would be other words. Train the run's own model, or one of its checkpoints."
        )


def open_examples(cfg: Config) -> Examples:
    """What ``--train-data`` or ``--sft-from`` names. Raises AgentRLError."""
    return WrittenChats(cfg, cfg.train_data) if cfg.train_data is not None else StoredTrajectories(cfg)


def check_examples(cfg: Config) -> None:
    """Read the data, and make tokens of the first example, so that what is wrong is said before anything starts."""
    open_examples(cfg).segments(0)
    if cfg.eval_data is not None:
        WrittenChats(cfg, cfg.eval_data).segments(0)


class SupervisedData:
    """Examples as batches: each once an epoch, in an order that the seed gives each epoch. An account is kept of them,
    as of tasks, so that a run that goes on does so with the next one.

    Args:
        examples: what is learned.
        size: examples of a batch.
        seed: of the order.
        longest: most tokens of a segment; an example with a longer one is left out and counted as dropped.
    """

    def __init__(self, examples: Examples, *, size: int, seed: int, longest: int):
        self.examples, self.size, self.longest = examples, size, longest
        ids = examples.ids
        self._source = TaskSource("sft", len(ids), seed=seed, id_of_task=lambda split, index: ids[index])
        self.account = TaskAccount(self._source)
        self._digest = hashlib.sha256("\n".join(ids).encode()).hexdigest()
        self._drawing = threading.Lock()  # a run that is asked to end saves, and a batch may be on its way
        self._in_training: list[str] = []
        self._too_long: set[str] = set()

    @classmethod
    def of(cls, cfg: Config) -> SupervisedData:
        """As the options say. Raises AgentRLError."""
        return cls(open_examples(cfg), size=cfg.rollout_batch_size, seed=cfg.seed, longest=cfg.rollout_max_context_len)

    def next_batch(self) -> tuple[TrainBatch, str | None]:
        """The next examples, without columns; a sentence on those that are too long, the first time.
        Raises DataError: one cannot be made into tokens, or all of an epoch are too long."""
        with self._drawing:
            groups, passed, named = list[Group](), 0, list[str]()
            while len(groups) < self.size:
                for pending in self.account.get_samples(self.size - len(groups)):
                    segments = self.examples.segments(pending.task.options["index"])
                    if max(map(len, segments), default=0) <= self.longest:
                        groups.append(learned(pending.group_id, pending.task, segments))
                        continue
                    self.account.drop([pending.group_id])
                    passed += 1
                    if pending.task.task_id not in self._too_long:
                        self._too_long.add(pending.task.task_id)
                        named.append(pending.task.task_id)
                    if not groups and passed >= len(self.examples.ids):
                        raise DataError(
                            f"all {len(self.examples.ids)} examples are longer than --rollout-max-context-len "
                            f"{self.longest}, the last of {max(map(len, segments))} tokens. Raise the limit."
                        )
            self.account.add_samples(groups)
            self._in_training = [group.group_id for group in groups]
            return batch_of(groups), too_long(named, self.longest)

    def mark_trained(self) -> dict[str, float]:
        """The optimizer has taken the last batch; metrics of the account."""
        self.account.mark_trained(self._in_training)
        self._in_training = []
        counts = {f"data/{name}": float(count) for name, count in self.account.counts.items()}
        return counts | {"data/epoch": self._source.cursor / len(self.examples.ids)}

    async def state(self, folder: Path) -> dict[str, Any]:
        """JSON-ready state for a checkpoint."""
        with self._drawing:
            return {"buffer": self.account.state_dict(), "data": self._digest}

    async def load_state(self, state: dict[str, Any], folder: Path) -> None:
        """Go on from a checkpoint's state. Raises DataError where other examples were learned."""
        if state.get("data") != self._digest:
            raise DataError(
                "the checkpoint was made with other examples than --train-data or --sft-from has now, so its place in "
                "them is unknown. Put the old ones back, or start a new run from its model: agentrl export, and "
                "--hf-checkpoint."
            )
        self.account.load_state_dict(state["buffer"])


class HeldOut:
    """Conversations that are not learned, whose loss says whether what is learned holds for others.

    Attributes:
        batch: all of them, without columns.
        left_out: a sentence on those that are too long, where there are any.
    """

    def __init__(self, examples: Examples, longest: int):
        groups, named = list[Group](), list[str]()
        for number, name in enumerate(examples.ids):
            segments = examples.segments(number)
            if max(map(len, segments)) <= longest:
                groups.append(learned(f"{number}", Task(name, 0), segments))
            else:
                named.append(name)
        if not groups:
            raise DataError(f"all {len(named)} conversations of --eval-data are longer than --rollout-max-context-len.")
        self.batch, self.left_out = batch_of(groups), too_long(named, longest)

    @classmethod
    def of(cls, cfg: Config) -> HeldOut | None:
        """The conversations of ``--eval-data``; None: there are none. Raises AgentRLError."""
        return cls(WrittenChats(cfg, cfg.eval_data), cfg.rollout_max_context_len) if cfg.eval_data is not None else None

    def loss(self, logprobs: np.ndarray) -> float:
        """Mean negative log-likelihood of its learned tokens, in nats, from float32[T] that are 0 elsewhere."""
        return -float(logprobs.sum(dtype=np.float64)) / self.batch.num_sampled


def learned(group_id: str, task: Task, segments: list[Segment]) -> Group:
    """An example as a group of one."""
    return Group(group_id, task, [Trajectory(group_id, group_id, task, segments, [])])


def batch_of(examples: list[Group]) -> TrainBatch:
    """A batch of examples; without columns, since no engine sampled them."""
    return replace(TrainBatch.from_groups(examples, {group.group_id for group in examples}), columns={})


def too_long(names: Sequence[str], longest: int) -> str | None:
    """What to say of examples that are left out for their length, if there are any."""
    if not names:
        return None
    return (
        f"{len(names)} examples have more tokens than --rollout-max-context-len {longest} and are left out: "
        f"{', '.join(names[:5])}{', ...' if len(names) > 5 else ''}"
    )


async def supervised_loop(
    cfg: Config,
    *,
    start: int,
    trainer: TrainerHandle,
    rollout: SupervisedData,
    held_out: HeldOut | None,
    checkpoints: CheckpointStore,
    run: RunDir,
    progress: Progress,
) -> None:
    """Train from step ``start`` to ``cfg.num_rollout``: a batch, credit, update, held-out loss, save."""
    import ray

    algorithm = load_algorithm(cfg.section(AlgorithmOptions))
    lasting = Lasting()
    reference = [ray.put(held_out.batch)] if held_out is not None else []

    async def evaluate(version: int) -> None:
        assert held_out is not None
        progress.stage("measuring the held-out loss")
        began = time.monotonic()
        loss = held_out.loss((await trainer.infer(reference, ["old"]))["old"])
        log.info("held-out loss after step %d: %.4f", version, loss)
        progress.log(Text(f"[{clock(progress.elapsed)}] held-out loss after step {version}: {loss:.4f}"))
        run.log_metrics(version, {HELD_OUT: loss, "time/eval": time.monotonic() - began})

    progress.warn(held_out.left_out if held_out is not None else None)
    if cfg.eval_interval and (start or cfg.eval_before_train):
        await evaluate(start)  # of a run that goes on, too: its folder was brought back to before that
    for step in range(start, cfg.num_rollout):
        began = time.monotonic()
        checkpoints.check()
        progress.stage("training")
        batch, left_out = await asyncio.to_thread(rollout.next_batch)
        made = time.monotonic()
        checkpoints.unsaved = None
        trained, _ = await trainer.update([ray.put(batch)], algorithm.prepare(batch))
        version = step + 1
        metrics = trained | rollout.mark_trained() | {"time/data": made - began, "time/step": time.monotonic() - began}
        report(version, metrics, run=run, progress=progress)
        checkpoints.unsaved = version
        progress.warn(left_out)
        progress.warn(lasting.say("gradients", steps_left_out(trained)))
        if due(version, cfg.eval_interval, cfg.num_rollout):
            await evaluate(version)
        if due(version, cfg.save_interval, cfg.num_rollout):
            progress.stage("saving a checkpoint")
            await checkpoints.save(version, trainer=trainer, rollout=rollout)
    await saved(checkpoints, progress)


def report(version: int, metrics: dict[str, float], *, run: RunDir, progress: Progress) -> None:
    """Write one step's metrics and show its line."""
    log.info("step %d: %s", version, spoken(metrics))
    run.log_metrics(version, metrics)
    progress.step_done(
        version,
        None,
        None,
        f"step {version}: loss {metrics['train/loss']:.4f}  {metrics['train/sampled_tokens']:,.0f} of "
        f"{metrics['train/tokens']:,.0f} tokens learned  epoch {metrics['data/epoch']:.2f}  "
        f"grad norm {metrics['train/grad_norm']:.2f}  {metrics['time/step']:.1f} s",
    )
