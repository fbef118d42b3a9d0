import json
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import ConfigError, DataError
from agentrl.tasks.source import TaskSource, env_label, held_out_tasks


def env(**sizes):
    """An environment with these splits and sizes, as far as a task source looks at it."""
    fake = types.SimpleNamespace(splits=tuple(sizes), num_tasks=lambda split: sizes[split], id_of_task=lambda *_: None)
    fake.unwrapped = fake
    return fake


def test_each_epoch_has_every_task_once_in_its_own_order():
    source = TaskSource("search", 20, seed=1)
    epochs = [[task.options["index"] for task in source.next_groups(20)] for _ in range(3)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] and epochs[0] != list(range(20))
    assert source.epoch == 3


def test_order_depends_on_the_seed_only():
    def order(seed, sizes):
        source = TaskSource("search", 7, seed=seed)
        return [task.task_id for size in sizes for task in source.next_groups(size)]

    assert order(3, [10]) == order(3, [1, 4, 5])
    assert order(3, [10]) != order(4, [10])


def test_a_task_is_the_same_in_every_epoch():
    source = TaskSource("search", 3, seed=0)
    seeds = {}
    for task in source.next_groups(12):
        assert seeds.setdefault(task.task_id, task.seed) == task.seed
    assert len(seeds) == 3


def test_unlimited_splits_are_drawn_by_seed():
    tasks = TaskSource("search", None, seed=5).next_groups(200)
    assert len({task.seed for task in tasks}) == 200
    assert tasks == TaskSource("search", None, seed=5).next_groups(200)
    assert all(task.options == {"split": "train"} and 0 <= task.seed < 2**31 for task in tasks)


def test_ids_are_stable():
    """Stored trajectories and saved runs refer to tasks by these."""
    assert [t.task_id for t in TaskSource("pkg.envs:MyEnv", 3).next_groups(3)] == [
        "MyEnv/train/2",
        "MyEnv/train/0",
        "MyEnv/train/1",
    ]
    assert [t.seed for t in TaskSource("search", None, seed=0).next_groups(2)] == [1028437303, 1864225368]


@pytest.mark.parametrize(
    ("spec", "label"),
    [
        ("search", "search"),
        ("a.b:Env", "Env"),
        ("some dir/my file.py:Env", "Env"),
        ("agentrl/search-v0", "search-v0"),
        ("../..", "env"),
        (":", "env"),
    ],
)
def test_label_is_fit_for_a_folder(spec, label):
    assert env_label(spec) == label


@given(
    st.integers(1, 40) | st.none(), st.integers(0, 100), st.lists(st.integers(0, 17), max_size=6), st.integers(0, 17)
)
def test_saved_state_continues_exactly(size, seed, taken, rest):
    source = TaskSource("search", size, seed=seed)
    for n in taken:
        source.next_groups(n)
    other = TaskSource("search", size, seed=seed + 1)
    other.load_state_dict(json.loads(json.dumps(source.state_dict())))
    assert other.next_groups(rest) == source.next_groups(rest)


def test_changed_data_is_refused():
    state = TaskSource("search", 10).state_dict()
    with pytest.raises(DataError, match="num_tasks=10.*now it is 11"):
        TaskSource("search", 11).load_state_dict(state)


def test_held_out_tasks_are_fixed_and_thinned_evenly():
    tasks = held_out_tasks("search", env(train=5, test=1000), limit=50)
    assert tasks == held_out_tasks("search", env(train=9, test=1000), limit=50)
    indices = [task.options["index"] for task in tasks]
    assert indices == sorted(set(indices)) and len(indices) == 50 and max(indices) > 800
    assert len(held_out_tasks("search", env(test=30), limit=50)) == 30


def test_held_out_seeds_are_not_training_seeds():
    held = {task.seed for task in held_out_tasks("search", env(train=None, test=None), limit=300)}
    trained = {task.seed for task in TaskSource("search", None, seed=0).next_groups(300)}
    assert len(held) == 300 and not held & trained


def test_wrong_splits():
    with pytest.raises(ConfigError, match="no split 'dev'; it has train, test"):
        held_out_tasks("search", env(train=1, test=1), split="dev")
    with pytest.raises(ConfigError, match="--eval-tasks"):
        held_out_tasks("search", env(test=None))
    with pytest.raises(DataError, match="no tasks"):
        held_out_tasks("search", env(test=0))
    with pytest.raises(DataError, match="no tasks"):
        TaskSource.of_env("search", env(train=0))
    assert TaskSource.of_env("search", env(train=4)).num_tasks == 4
