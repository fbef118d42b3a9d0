import json

import pytest

from agentrl.config import load_config, load_eval_config
from agentrl.errors import ConfigError
from agentrl.evaluation.heldout import held_out_sets


@pytest.fixture
def tasks(tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i} + {i}?", "label": str(2 * i)}) + "\n" for i in range(20)))
    return str(path)


def config(*argv: str):
    return load_config(["--eval-tasks", "5", "--eval-interval", "1", *argv])


def test_the_environments_own_split_is_thinned_and_fixed():
    first, second = (held_out_sets(config("--env", "search", "--seed", seed))[0] for seed in ("1", "2"))
    assert first.name == "search" and len(first.tasks) == 5
    assert first.tasks == second.tasks, "two runs must be compared on the same held-out tasks"


def test_files_are_held_out_whole_beside_the_environment(tasks):
    sets = held_out_sets(config("--env", "search", "--eval-prompt-data", "sums", tasks))
    assert [(s.name, s.split, len(s.tasks)) for s in sets] == [("search", "test", 5), ("sums", "all", 5)]


def test_the_name_of_a_file_must_serve_as_a_file_name(tasks):
    with pytest.raises(ConfigError, match=r"--eval-prompt-data: the name 'my set'"):
        config("--env", "search", "--eval-prompt-data", "my set", tasks)


def test_prompt_data_without_held_out_tasks_says_what_to_give(tasks):
    with pytest.raises(ConfigError, match=r"--eval-prompt-data NAME PATH.*test_fraction"):
        held_out_sets(config("--prompt-data", tasks))


def test_prompt_data_evaluated_on_another_file(tasks):
    sets = held_out_sets(config("--prompt-data", tasks, "--eval-prompt-data", "sums", tasks))
    assert [s.name for s in sets] == ["sums"]


def test_prompt_data_with_a_share_kept_back(tasks):
    (only,) = held_out_sets(config("--prompt-data", tasks, "--env-arg", "test_fraction=0.5"))
    assert only.split == "test" and 0 < len(only.tasks) <= 5


def test_nothing_to_evaluate_on():
    with pytest.raises(ConfigError, match="nothing to evaluate on"):
        held_out_sets(config("--env", "search", "--no-eval-own-split"))


def test_two_sets_of_one_name(tasks):
    with pytest.raises(ConfigError, match="distinct names"):
        held_out_sets(config("--env", "search", "--eval-prompt-data", "search", tasks))


# -- several environments -------------------------------------------------------------------------------


def eval_sets(*argv: str, split: str = "test"):
    limit = () if "--task-id" in argv else ("--limit", "5")
    return held_out_sets(load_eval_config([*limit, *argv]), split=split)


@pytest.fixture
def second(tmp_path):
    """An environment of one's own, with arguments."""
    path = tmp_path / "second.py"
    path.write_text(
        "import agentrl\n"
        "class Second(agentrl.Env):\n"
        "    def __init__(self, size=7, **settings):\n"
        "        self.size = size\n"
        "    def num_tasks(self, split):\n"
        "        return self.size if split == 'test' else 100\n"
        "    def reset(self, *, seed=None, options=None):\n"
        "        return 'hello', {}\n"
        "    def step(self, action):\n"
        "        return '', 1.0, True, False, {}\n"
    )
    return f"{path}:Second"


def test_each_environment_is_a_set_with_arguments_of_its_own(second):
    for flags in (["--env", f"search,{second}"], ["--env", "search", "--env", second]):
        sets = eval_sets(*flags, "--env-arg", "Second.size=3", "--env-arg", "search.topk=2")
        assert [(s.name, len(s.tasks), s.kwargs) for s in sets] == [
            ("search", 5, {"topk": 2}),
            ("Second", 3, {"size": 3}),
        ]


def test_arguments_must_say_whose_they_are(second):
    with pytest.raises(ConfigError, match=r"--env-arg size could be meant for any of search, .*NAME.size=VALUE"):
        eval_sets("--env", "search", "--env", second, "--env-arg", "size=3")
    with pytest.raises(ConfigError, match=r"--env-arg third.size.*there are search, Second"):
        eval_sets("--env", "search", "--env", second, "--env-arg", "third.size=3")
    with pytest.raises(ConfigError, match="there is one environment"):
        eval_sets("--env", second, "--env-arg", "Second.size=3")


def test_training_evaluates_other_environments_beside_or_in_place_of_its_own(second):
    flags = ["--env", "search", "--eval-env", second, "--env-arg", "topk=2", "--env-arg", "Second.size=2"]
    beside = held_out_sets(config(*flags))
    assert [(s.name, len(s.tasks), s.kwargs) for s in beside] == [
        ("search", 5, {"topk": 2}),
        ("Second", 2, {"size": 2}),
    ]
    assert [s.name for s in held_out_sets(config(*flags, "--no-eval-own-split"))] == ["Second"]


def test_an_evaluation_of_a_run_is_of_all_its_held_out_sets(second, tasks, tmp_path):
    flags = ["--env", "search", "--eval-env", second, "--env-arg", "topk=2", "--env-arg", "Second.size=2"]
    trained = config(*flags, "--eval-prompt-data", "sums", tasks)
    (tmp_path / "config.json").write_text(json.dumps(trained.to_dict()))
    assert held_out_sets(load_eval_config(["--run", str(tmp_path)])) == held_out_sets(trained)
    own = eval_sets("--run", str(tmp_path), "--env", "search")
    assert [(s.name, s.kwargs) for s in own] == [("search", {})]
    (other,) = eval_sets("--env", "search", "--eval-env", second, "--no-eval-own-split")
    assert other.name == "Second"


def test_what_counts_as_solved_holds_for_every_file(tasks):
    graded = ["--prompt-data", tasks, "--rm-type", "f1", "--env-arg", "success_reward=0.5", "--env-arg", "max_turns=1"]
    files = ["--eval-prompt-data", "sums", tasks, "--eval-prompt-data", "more", tasks]
    share = ["--env-arg", "test_fraction=0.2"]  # of the training file alone: the others are held out whole
    for of in (config, eval_sets):
        _, sums, more = held_out_sets_of(of, *graded, *share, *files, "--env-arg", "more.success_reward=0.7")
        assert (sums.kwargs["success_reward"], more.kwargs["success_reward"]) == (0.5, 0.7)
        assert sums.kwargs["max_turns"] == 1 and sums.available == 20 and "test_fraction" not in sums.kwargs
    (alone,) = eval_sets("--eval-prompt-data", "sums", tasks, "--env-arg", "sums.success_reward=0.5")
    assert alone.kwargs["success_reward"] == 0.5


def held_out_sets_of(make, *flags):
    made = make(*flags)
    return made if isinstance(made, list) else held_out_sets(made)


# -- named tasks ----------------------------------------------------------------------------------------


def test_tasks_by_id_and_by_number(second):
    (only,) = eval_sets("--env", second, "--task-id", "Second/test/6", "--task-id", "2", "--task-id", "Second/test/2")
    assert [t.task_id for t in only.tasks] == ["Second/test/6", "Second/test/2"]
    (whole,) = eval_sets("--env", second)
    assert only.tasks[1] in whole.tasks, "a task is the same, however it was chosen"


def test_an_unknown_task_names_those_near(second):
    with pytest.raises(ConfigError, match=r"--task-id Second/tets/3: there is no such task. Near it: Second/test/\d"):
        eval_sets("--env", second, "--task-id", "Second/tets/3")
    with pytest.raises(ConfigError, match="--task-id 7"):
        eval_sets("--env", second, "--task-id", "7")


def test_a_task_of_one_set_leaves_the_others_out(second):
    sets = eval_sets("--env", "search", "--env", second, "--task-id", "Second/test/1")
    assert [(s.name, len(s.tasks)) for s in sets] == [("Second", 1)]


def test_a_task_of_a_split_without_end_is_its_seed(tmp_path):
    path = tmp_path / "drawn.py"
    path.write_text(
        "import agentrl\n"
        "class Drawn(agentrl.Env):\n"
        "    def reset(self, *, seed=None, options=None):\n"
        "        return 'hello', {}\n"
        "    def step(self, action):\n"
        "        return '', 1.0, True, False, {}\n"
    )
    spec = f"{path}:Drawn"
    (whole,) = eval_sets("--env", spec)
    (named,) = eval_sets("--env", spec, "--task-id", whole.tasks[3].task_id, "--task-id", "1")
    assert named.tasks == [whole.tasks[3], whole.tasks[1]]
    (far,) = eval_sets("--env", spec, "--task-id", "999999999999")  # of which no list is made
    assert len(far.tasks) == 1 and far.tasks[0] not in whole.tasks
    with pytest.raises(ConfigError, match="--task-id nope: there is no such task. Near it: Drawn/test/seed-"):
        eval_sets("--env", spec, "--task-id", "nope")
