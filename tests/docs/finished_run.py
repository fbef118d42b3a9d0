"""A run folder as training leaves it, of episodes that were played by a scripted policy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from shown_pages import ROOT, blocks

import agentrl
from agentrl.config import load_config
from agentrl.data.files import JsonLines
from agentrl.data.records import to_record
from agentrl.data.run_folder import RunDir, flatten_summary
from agentrl.demo import MODEL_DIR
from agentrl.evaluation.metrics import summarize
from agentrl.orchestrator.metrics import pace, rollout_metrics
from agentrl.rollout.episode import EpisodeLimits, run_episode
from agentrl.rollout.generate_hook import load_generate_function
from agentrl.rollout.policies.scripted import ScriptedClient
from agentrl.rollout.template.chat import ChatTemplate
from agentrl.types import Group, SamplingParams, Task, Trajectory
from tests.trainer.samples import credited


def shop_source() -> str:
    """The README's ``shop.py``."""
    (code,) = [b.code for b in blocks(ROOT / "README.md") if b.language == "python" and "class Shopping" in b.code]
    return code


def shopper(prices: dict[str, int]) -> Callable[[str, int], str]:
    """A policy that looks up every price and adds them."""

    def policy(conversation: str, turn: int) -> str:
        question = conversation.rpartition("What do ")[2].partition(" cost together?")[0]
        items = question.split(", ")
        if turn == 0:
            call = '<tool_call>\n{"name": "price", "arguments": {"item": "%s"}}\n</tool_call>'
            return "".join(call % item for item in items)
        return str(sum(prices[item] for item in items))

    return policy


def play(
    spec: str, script, *, index: int, number: int = 0, split: str = "train", generate: str | None = None
) -> Trajectory:
    """One episode of task ``index`` by a script; ``generate`` names a custom generate function."""
    chat = ChatTemplate(MODEL_DIR)
    group = f"g{index:08d}"
    return asyncio.run(
        run_episode(
            agentrl.make(spec),
            Task(f"{split}/{index}", seed=index, split=split, options={"index": index}),
            client=ScriptedClient(script, chat),
            chat=chat,
            params=SamplingParams(max_new_tokens=512),
            limits=EpisodeLimits(max_response_len=512),
            trajectory_id=f"{group}-{number:03d}",
            group_id=group,
            generate=load_generate_function(generate),
        )
    )


def played_groups(spec: str, prices: dict[str, int]) -> list[Group]:
    """Two groups of two episodes, of which one each is right."""
    groups = []
    for index in range(2):
        episodes = [
            play(spec, shopper(prices), index=index, number=0),
            play(spec, ["I do not know."], index=index, number=1),
        ]
        groups.append(Group(episodes[0].group_id, episodes[0].task, episodes))
    return groups


def write_run(folder: Path, shop: Path) -> list[Trajectory]:
    """Make ``folder`` a run of one step with an evaluation after it; returns the episodes."""
    scope: dict = {}
    exec(shop.read_text(encoding="utf-8"), scope)
    groups = played_groups(f"{shop}:Shopping", scope["PRICES"])
    config = load_config(
        ["--env", f"{shop}:Shopping", "--num-rollout", "1", "--rollout-batch-size", "2", "--n-samples-per-prompt", "2",
         "--output-dir", str(folder)]
    )  # fmt: skip
    batch = credited(groups)
    episodes = [t for g in groups for t in g.trajectories]
    batch.note_trained(episodes, batch.columns, tokens=True)
    with RunDir.create(config) as run:
        run.log_metrics(1, rollout_metrics(groups, 0) | pace(groups, 1.0))
        run.store.write(0, episodes)
        run.store.write(1, episodes, name="eval-Shopping")
        run.log_metrics(1, flatten_summary("Shopping", summarize("Shopping", "test", episodes, 1.0).to_dict()))
    return episodes


def write_evaluation(folder: Path, episodes: list[Trajectory]) -> None:
    """What ``agentrl eval`` writes of its episodes."""
    folder.mkdir(parents=True)
    lines = JsonLines(folder / "trajectories.jsonl")
    for episode in episodes:
        lines.append(to_record(episode))
    lines.close()
