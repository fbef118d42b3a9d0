"""Groups that were played and are not trained on yet, in a checkpoint: a run that goes on plays none of them again."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from agentrl.config.schema import Config, DatedTemplateOptions, EnvironmentOptions, SamplingOptions
from agentrl.data.account import PendingGroup
from agentrl.data.deaths import lived
from agentrl.data.episodes import by_group, forget_training
from agentrl.data.store import TrajectoryStore
from agentrl.types import Group

log = logging.getLogger(__name__)

NAME = "buffer"
"""Of the stored part: ``rollout/buffer-000003.parquet`` in a checkpoint."""

_PLAYED_AS = (
    *(f.name for s in (EnvironmentOptions, SamplingOptions, DatedTemplateOptions) for f in dataclasses.fields(s)),
    *("n_samples_per_prompt", "max_turns", "max_tool_output_tokens"),
    *("rollout_max_response_len", "rollout_max_context_len"),
)
"""Options without which an episode would have been another one."""


class Buffer:
    """What a checkpoint holds of rollouts that were ahead: groups that finished, tokens and all. Their tasks are handed
    out again under the same ids, and :meth:`take` gives the group in place of playing it. So filters, deaths and the
    limit of staleness apply to it as they would have, and the account knows one way only.

    Args:
        cfg: says how episodes are played. Those that were played otherwise are left out, and played again.

    Attributes:
        taken: ids of the groups that were taken, so not played by this run.
    """

    def __init__(self, cfg: Config):
        values = cfg.to_dict()
        self._how = {name: values[name] for name in _PLAYED_AS}
        self._groups: dict[str, Group] = {}
        self.taken: set[str] = set()

    def __len__(self) -> int:
        return len(self._groups)

    def take(self, pending: PendingGroup) -> Group | None:
        """The group of this task, if it was played; it is no longer here then."""
        if (group := self._groups.pop(pending.group_id, None)) is not None:
            self.taken.add(group.group_id)
        return group

    def to_save(self, ahead: Iterable[Group]) -> list[Group]:
        """What a checkpoint of now is to hold: what is here, and of the groups ``ahead`` those that lived."""
        return [*self._groups.values(), *filter(lived, ahead)]

    def save(self, folder: Path, step: int, groups: list[Group]) -> dict[str, Any]:
        """Write ``groups`` below ``folder``, of a checkpoint after ``step`` rollouts; JSON-ready state to go with it.
        Raises StorageError: the disk refuses."""
        if groups:
            trajectories = (t for group in groups for t in group.trajectories)
            TrajectoryStore(folder).write(step, trajectories, name=NAME)
        return {"groups": len(groups), "played_as": self._how}

    def load(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Take up what :meth:`save` wrote. Raises DataError: the file is torn."""
        self._groups = {}
        was = state.get("played_as", {})
        if changed := [name for name in self._how if was.get(name) != self._how[name]]:
            if state.get("groups"):
                flags = ", ".join("--" + name.replace("_", "-") for name in changed)
                log.warning("%d groups that were played ahead are played again: changed was %s", state["groups"], flags)
            return
        for group in by_group(TrajectoryStore(folder, read_only=True).read(NAME)):
            forget_training(group.trajectories)  # it may have been trained on while it was written
            self._groups[group.group_id] = group
