"""Which groups of earlier rollouts are trained on again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl.config import load_config
from agentrl.config.schema import Config
from agentrl.data.experience import BUFFER_FILTERS, Experience, load_buffer_filter
from agentrl.errors import ConfigError, EnvError
from agentrl.types import Group, Segment, StopReason, Task, Trajectory

SIZE = ("--env", "search", "--rollout-batch-size", "4", "--n-samples-per-prompt", "4")


def group(number: int, *rewards: float, version: int = 0, advantage: float = 0.0) -> Group:
    name, task = f"g{number:08d}", Task(f"t/{number}", number)
    mask = np.array([0, 1], np.uint8)
    segment = Segment(mask.astype(np.int32), mask, np.zeros(2, np.float32), np.array([-1, version], np.int32), 1)
    parts = [
        Trajectory(f"{name}-{i}", name, task, [segment], [], reward=reward, advantage=advantage * (-1) ** i)
        for i, reward in enumerate(rewards)
    ]
    return Group(name, task, parts)


def numbers(groups: Any) -> list[int]:
    return [int(each.group_id[1:]) for each in groups]


@pytest.fixture
def cfg() -> Config:
    return load_config([*SIZE, "--replay-share", "0.25"])


def test_newest_and_best(cfg: Config) -> None:
    buffer = [group(0, 1, 0), group(1, 1, 1), group(2, 0, 0), group(3, 1, 1)]
    assert numbers(BUFFER_FILTERS["newest"](cfg, buffer, 2)) == [2, 3]
    assert numbers(BUFFER_FILTERS["best"](cfg, buffer, 3)) == [3, 1, 0]
    buffer[3].trajectories[0].stop_reason = StopReason.ENV_ERROR
    buffer[3].trajectories[1].stop_reason = StopReason.ENV_ERROR
    assert numbers(BUFFER_FILTERS["best"](cfg, buffer, 4)) == [1, 0, 2, 3], "one without a score is no good"


def test_prioritized_takes_what_taught_most_more_often(cfg: Config) -> None:
    taken = np.zeros(4)
    for seed in range(200):
        buffer = [group(n, 1, 0, advantage=(0.0, 1.0, 1.0, 6.0)[n]) for n in range(4)]
        for number in numbers(BUFFER_FILTERS["prioritized"](cfg.replace(seed=seed), buffer, 1)):
            taken[number] += 1
    assert taken[0] == 0 and taken[3] > 3 * max(taken[1:3]) > 0
    assert sorted(numbers(BUFFER_FILTERS["prioritized"](cfg, buffer, 4))) == [0, 1, 2, 3]


def test_stratified_takes_of_all_levels_of_success_alike(cfg: Config) -> None:
    buffer = [group(n, 0, 0) for n in range(20)] + [group(20, 1, 0), group(21, 1, 1), group(22, 1, 1)]
    chosen = numbers(BUFFER_FILTERS["stratified"](cfg, buffer, 6))
    assert {20, 21, 22} < {*chosen} and len({*chosen}) == 6


def test_a_draw_is_the_same_for_the_same_buffer(cfg: Config) -> None:
    buffer = [group(n, 1, 0, advantage=1.0) for n in range(30)]
    for name in ("prioritized", "stratified"):
        draw = BUFFER_FILTERS[name]
        assert numbers(draw(cfg, buffer, 5)) == numbers(draw(cfg, buffer, 5)) != numbers(draw(cfg, buffer[1:], 5))


def test_a_function_of_ones_own(tmp_path: Path, cfg: Config) -> None:
    (tmp_path / "mine.py").write_text(
        "def oldest(args, buffer, num_samples):\n    return buffer[: min(num_samples, args.rollout_batch_size)]\n"
        "def twice(args, buffer, num_samples): return [buffer[0], buffer[0]]\n"
        "def all(args, buffer, num_samples): return buffer\n"
        "def names(args, buffer, num_samples): return [group.group_id for group in buffer]\n"
        "def nothing(args, buffer, num_samples): return None\n"
    )
    buffer = [group(n, 1, 0) for n in range(4)]
    own = load_buffer_filter(f"{tmp_path / 'mine.py'}:oldest")
    assert numbers(own(cfg, buffer, 2)) == [0, 1]
    for name, problem in {
        "twice": "returned 2 groups; expected 0 to 2 different ones",
        "all": "returned 4 groups; expected 0 to 2 different ones",
        "names": "returned 'g00000000'; expected some of the groups",
        "nothing": "mine.py:nothing: TypeError",
    }.items():
        with pytest.raises(EnvError, match=problem):
            load_buffer_filter(f"{tmp_path / 'mine.py'}:{name}")(cfg, buffer, 2)
    with pytest.raises(ConfigError, match="expected newest, best, prioritized, stratified, or a function"):
        load_buffer_filter("oldest")


def test_the_first_batch_has_none_and_what_is_too_old_or_long_gone_is_not_taken(cfg: Config) -> None:
    experience = Experience(cfg.replace(replay_buffer_size=2))
    assert [experience.number_at(step) for step in (3, 4, 5)] == [0, 1, 1]
    experience.add(3, [group(0, 1, 0, version=3)])
    assert numbers(experience.pick(4, oldest=9)) == [0]
    assert numbers(experience.pick(8, oldest=4)) == []
    experience.add(4, [group(1, 1, 0, version=4)])
    experience.add(5, [])
    assert numbers(experience.pick(6, oldest=9)) == [1]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--replay-share", "0.1"), "--replay-share 0.1 of --rollout-batch-size 4 is 0 groups.*nothing to replay"),
        (("--replay-share", "0.9"), "4 groups, which leaves no new task"),
        (("--buffer-filter-path", "best"), "--buffer-filter-path has no effect without --replay-share"),
        (
            (
                *("--replay-share", "0.5", "--over-sampling-batch-size", "8"),
                *("--partial-rollout", "--mask-offpolicy-in-partial-rollout"),
            ),
            "leaves the old tokens out of the loss that --replay-share takes",
        ),
        (("--replay-share", "0.5", "--debug-rollout-only"), "--replay-share 0.5: .* nothing to train on again"),
    ],
)
def test_options_that_do_not_go_together(flags: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config([*SIZE, *flags])
