import json

import pytest

from agentrl.config import load_config
from agentrl.errors import AgentRLError, ConfigError
from agentrl.evaluation.heldout import held_out_sets
from agentrl.evaluation.metrics import summarize
from agentrl.evaluation.run import refuse_if_unscored
from agentrl.types import StopReason, Task, Trajectory


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


def test_an_evaluation_in_which_nothing_was_scored_is_a_failure():
    task = Task("t", 0)
    failed = Trajectory("a", "g", task, [], [], stop_reason=StopReason.ENGINE_ERROR)
    fine = Trajectory("b", "g", task, [], [], success=True)
    refuse_if_unscored({"search": summarize("search", "test", [failed, fine], 1.0)})
    with pytest.raises(AgentRLError, match=r"not one of 1 episodes .*engine_error 1"):
        refuse_if_unscored({"search": summarize("search", "test", [failed], 1.0)})


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
