"""An episode as a person reads it: turn by turn, what is trained apart from what is not.

Two views. Of tokens, where they are stored and the model's tokenizer is at hand: exactly what the model saw and wrote.
Of messages otherwise. In both, every line of the model's own has the mark :data:`TRAINED`, every other one
:data:`MASKED`, so that they can be told apart without colours too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.text import Text

from agentrl.config.names import nearest
from agentrl.data.episodes import by_episode, is_error, solved
from agentrl.errors import ConfigError, DataError
from agentrl.evaluation.results import EvalResult
from agentrl.processes.signals import printable
from agentrl.progress import message_text
from agentrl.types import Outcome, Segment, Trajectory

TRAINED, MASKED = "▌", "│"
STYLES = {TRAINED: "green", MASKED: "dim"}
BOUNDARY = "¦"
"""Between tokens, where their boundaries are shown."""

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Episode:
    """One stored episode: its set, its place among the set's episodes, a trajectory for each agent."""

    set: str
    index: int
    trajectories: list[Trajectory]

    @property
    def task_id(self) -> str:
        return self.trajectories[0].task.task_id

    @property
    def failed(self) -> bool:
        """Not solved, for whatever reason."""
        return is_error(self.trajectories) or not solved(self.trajectories)


def select(
    result: EvalResult, *, set: str | None = None, task: str | None = None, failed: bool = False
) -> list[Episode]:
    """The episodes of one ``set``, of one ``task`` (its id, or the end of it behind a ``/``), not solved, as asked for,
    in the order they were stored.
    Raises DataError: no such set or task."""
    if set is not None and set not in result.sets:
        raise DataError(f"{result.path} has no set {set!r}; it has {', '.join(result.sets)}.")
    episodes = [
        Episode(name, index, trajectories)
        for name, stored in result.sets.items()
        if set in (None, name)
        for index, trajectories in enumerate(by_episode(stored))
    ]
    if task is not None:
        episodes = _of_task(episodes, task, result.path)
    return [e for e in episodes if e.failed or not failed]


def _of_task(episodes: list[Episode], task: str, path: Path) -> list[Episode]:
    ids = list(dict.fromkeys(e.task_id for e in episodes))
    wanted = [i for i in ids if i == task] or [i for i in ids if i.endswith(f"/{task}")]
    if not wanted:
        close = nearest(task, ids)
        hint = f"Did you mean {close!r}?" if close else f"It has {', '.join(ids[:3])}{', ...' if len(ids) > 3 else ''}"
        raise DataError(f"{path} has no task {task!r} among {len(ids)}. {hint}")
    return [e for e in episodes if e.task_id in wanted]


# -- the tokenizer -----------------------------------------------------------------------------------------


def decoder(result: EvalResult, folder: str | None = None) -> Decode:
    """Ids to text, by the tokenizer of the run's model or of ``folder``.
    Raises ConfigError: there is none; the text says where it was looked for."""
    place = Path(folder).expanduser() if folder else _model_folder(result.config)
    if place is None:
        raise ConfigError(f"{result.path} does not say which model it is of; name one with --hf-checkpoint")
    file = place / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(f"no tokenizer.json in {place}; name the model's folder with --hf-checkpoint")
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ConfigError("showing tokens needs the package tokenizers: pip install tokenizers") from None
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the package raises nothing narrower
        raise ConfigError(f"{file}: not a tokenizer: {error}") from None
    return lambda ids: tokenizer.decode(list(map(int, ids)), skip_special_tokens=False)


def _model_folder(config: dict[str, Any]) -> Path | None:
    """Where the run's model was; training leaves the tokenizer as it is, so that of the first weights will do."""
    from agentrl.config.presets import model_folder
    from agentrl.config.serialize import read_run_config, run_folder_of

    if config.get("base_url"):
        return None
    run = run_folder_of(config["run"]) if config.get("run") else None
    if run is not None:
        config = read_run_config(run)
    named = config.get("hf_checkpoint")
    return None if named is None else Path(model_folder(named))


# -- the page ------------------------------------------------------------------------------------------------


def render(episode: Episode, *, decode: Decode | None = None, boundaries: bool = False) -> Iterator[Text]:
    """The lines of an episode, top to bottom. ``decode`` shows what the model saw and wrote, where tokens are stored,
    with ``boundaries`` where each ends; None shows messages."""
    several = len(episode.trajectories) > 1
    for trajectory in episode.trajectories:
        agent = f" · {trajectory.agent}" if several else ""
        yield _plain(f"━━ {episode.set} · task {episode.task_id} · episode {episode.index}{agent}", "bold")
        if decode is not None and trajectory.segments:
            yield from _tokens(trajectory, decode, boundaries)
        else:
            yield from _messages(trajectory)
        yield from _end(trajectory)
        yield Text()


def _tokens(trajectory: Trajectory, decode: Decode, boundaries: bool) -> Iterator[Text]:
    turn = 0
    for number, segment in enumerate(trajectory.segments):
        if number:
            yield _plain("── the history was rewritten: what follows is a new segment", "bold")
        for ids, trained in runs(segment):
            text = BOUNDARY.join(decode([i]) for i in ids) if boundaries else decode(ids.tolist())
            yield _block(text, TRAINED if trained else MASKED)
            if trained:
                yield _turn(trajectory, turn)
                turn += 1


def runs(segment: Segment) -> Iterator[tuple[np.ndarray, bool]]:
    """Stretches of tokens that are all trained, or all not."""
    ends = np.flatnonzero(np.diff(segment.loss_mask)) + 1
    for part in np.split(np.arange(len(segment)), ends):
        if len(part):
            yield segment.tokens[part], bool(segment.loss_mask[part[0]])


def _messages(trajectory: Trajectory) -> Iterator[Text]:
    # A prompt may hold assistant messages too: the model's own are the last ones.
    turn = trajectory.num_turns - sum(m.get("role") == "assistant" for m in trajectory.messages)
    for message in trajectory.messages:
        role = message.get("role", "?")
        own = role == "assistant" and turn >= 0
        yield _block(f"{role}: {message_text(message)}", TRAINED if own else MASKED)
        if own:
            yield _turn(trajectory, turn)
        turn += role == "assistant"


def _turn(trajectory: Trajectory, turn: int) -> Text:
    """What a turn earned, cost and called."""
    told = trajectory.info.get("turns") or []
    facts = [f"turn {turn + 1}"]
    if turn < len(trajectory.turn_rewards):
        facts.append(f"reward {trajectory.turn_rewards[turn]:g}")
    if turn < len(told):
        facts.append(f"{told[turn].get('sampled_tokens', '?')} tokens")
    for call in trajectory.tool_calls:
        if call.get("turn") == turn + 1:
            error = f" failed: {call['error']}" if call.get("error") else ""
            facts.append(f"called {call.get('name') or '?'}{error}")
    return _plain("   " + " · ".join(facts), "cyan")


def _end(trajectory: Trajectory) -> Iterator[Text]:
    verdict = {True: "success", False: "no success", None: "success not judged"}[trajectory.success]
    style = "bold green" if trajectory.success else "bold red" if trajectory.success is False else "bold"
    if trajectory.outcome is Outcome.INFRA_ERROR:
        verdict, style = "not scored", "bold yellow"
    parts = ", ".join(f"{name} {value:g}" for name, value in trajectory.rewards.items())
    reward = f"reward {trajectory.reward:g}" + (f" ({parts})" if parts else "")
    stopped = f"stopped: {trajectory.stop_reason} ({trajectory.outcome})"
    yield _plain(f"{verdict} · {reward} · {trajectory.num_turns} turns · {stopped}", style)
    answer = trajectory.info.get("answer")
    if answer is not None:
        yield _plain(f"right answer: {answer}", "bold")
    if trajectory.error:
        yield _plain(f"error: {trajectory.error}", "bold red")


def _block(text: str, mark: str) -> Text:
    lines = printable(text).removesuffix("\n").split("\n")
    return Text("\n".join(f"{mark} {line}" for line in lines), style=STYLES[mark])


def _plain(text: str, style: str) -> Text:
    return Text(printable(text), style=style)
