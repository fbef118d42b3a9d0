"""A task is known by its own id or its content, wherever it stands; and a row that can never be right is refused."""

import json
import math

import pytest

import agentrl
from agentrl import wrappers
from agentrl.cli.main import main
from agentrl.config import load_eval_config
from agentrl.data.records import to_record
from agentrl.envs.builtin.prompt import PromptEnv
from agentrl.errors import ConfigError, DataError, EnvError
from agentrl.evaluation.heldout import held_out_sets
from agentrl.evaluation.record import identity, refuse_other
from agentrl.rewards import RewardSet
from agentrl.tasks.dataset import content_hash
from agentrl.tasks.source import TaskSource, held_out_tasks
from agentrl.types import StopReason, Trajectory

ROWS = [{"prompt": f"{n} + {n}?", "label": str(2 * n)} for n in range(20)]


def data(path, rows):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def ids(path, **settings):
    env = PromptEnv(path, **settings)
    return {task.task_id: task for task in held_out_tasks("e", env, split="all")}, env


@pytest.mark.parametrize("streaming", [False, True])
def test_rows_are_known_by_their_content(tmp_path, streaming):
    before, _ = ids(data(tmp_path / "a" / "t.jsonl", ROWS), streaming=streaming)
    new = [{"prompt": "new?", "label": "x"}, {"prompt": "newer?", "label": "y"}]
    after, env = ids(data(tmp_path / "b" / "other.jsonl", new + ROWS[::-1]), streaming=streaming)
    assert set(after) - set(before) == {content_hash([row["prompt"], row["label"]]) for row in new}
    for name, task in before.items():
        moved = after[name]
        assert (moved.seed, moved.split) == (task.seed, task.split) and moved.options != task.options
        assert env.reset(seed=moved.seed, options=moved.options)[1]["task_id"] == name


@pytest.mark.parametrize("streaming", [False, True])
def test_an_own_id_stays_when_the_text_changes(tmp_path, streaming):
    rows = [{**row, "task_id": f"mine-{n}"} for n, row in enumerate(ROWS)]
    before, _ = ids(data(tmp_path / "a" / "t.jsonl", rows), streaming=streaming)
    rows[3] |= {"prompt": "Another?"}
    after, env = ids(data(tmp_path / "b" / "t.jsonl", rows[::-1]), streaming=streaming)
    assert set(before) == set(after) == {f"mine-{n}" for n in range(20)}
    assert env.reset(options=after["mine-3"].options) == ("Another?", env.reset(options=after["mine-3"].options)[1])


def test_equal_rows_are_told_apart_and_equal_ids_refused(tmp_path):
    assert len(ids(data(tmp_path / "t.jsonl", [ROWS[1], ROWS[1], ROWS[2]]))[0]) == 3
    with pytest.raises(DataError, match=r"u.jsonl:2: the task_id 'x' is taken by .*u.jsonl:1"):
        ids(data(tmp_path / "u.jsonl", [{**row, "task_id": "x"} for row in ROWS]))


@pytest.mark.parametrize("own", [[1], 1.5, True, ""])
def test_an_id_that_names_nothing_is_refused(tmp_path, own):
    with pytest.raises(DataError, match=r"v.jsonl:1: 'task_id' must be text or a whole number"):
        ids(data(tmp_path / "v.jsonl", [{**ROWS[0], "task_id": own}]))


@pytest.mark.parametrize("streaming", [False, True])
def test_rows_without_an_id_among_others_are_known_by_their_content(tmp_path, streaming):
    rows = [{**ROWS[0], "task_id": "mine"}, {**ROWS[1], "task_id": None}]  # as a table has them
    known, env = ids(data(tmp_path / "t.jsonl", rows), streaming=streaming)
    assert list(known) == ["mine", content_hash([ROWS[1]["prompt"], ROWS[1]["label"]])]
    assert [row["task_id"] for row in env.tasks["all"]] == list(known)


def test_rows_written_in_python_are_known_by_their_content_too():
    class Listed(agentrl.ToolEnv):
        tasks = {
            "train": [("7 * 8?", "56"), "why?"],
            "test": [{"prompt": "a", "answer": "b", "task_id": 7}, ("a", "b")] * 2,
        }
        reward = "exact_match"

    env = Listed()
    held_out = [task.task_id for task in held_out_tasks("e", env)]
    assert held_out == ["7", content_hash(["a", "b"]), "7-2", content_hash(["a", "b"]) + "-2"]
    drawn = {task.task_id for task in TaskSource.of_env("e", env).next_groups(2)}
    assert drawn == {content_hash(["7 * 8?", "56"]), content_hash(["why?", None])}
    assert env.reset(options={"split": "train", "index": 1})[1]["task_id"] == content_hash(["why?", None])


def test_rows_of_one_prompt_are_told_apart_by_what_else_they_hold():
    def ids_of(*layouts):
        class Maze(agentrl.ToolEnv):
            tasks = {"test": [{"prompt": "Find the way out.", "layout": layout} for layout in layouts]}
            reward = "exact_match"

        return [task.task_id for task in held_out_tasks("e", Maze())]

    assert ids_of("x", "y", "z")[1:] == ids_of("y", "z")
    bare = content_hash(["Find the way out.", None])
    assert ids_of(object(), {1, 2}) == [bare, f"{bare}-2"], "their text differs from process to process"


def test_tasks_that_are_made_by_number_are_known_by_it():
    assert [task.task_id for task in held_out_tasks("search", agentrl.make("search"), limit=2)][0].startswith(
        "search/test/"
    )


def test_a_fixed_list_names_its_own():
    env = wrappers.FixedTasks(agentrl.make("textgame"), [{"seed": 3, "task_id": "mine"}, {"seed": 4, "task_id": None}])
    assert [task.task_id for task in held_out_tasks("e", env)] == ["mine", "e/test/1"]


def chosen(path, *names):
    flags = [flag for name in names for flag in ("--task-id", name)]
    return held_out_sets(load_eval_config(["--eval-prompt-data", "t", path, "--hf-checkpoint", "demo", *flags]))[0]


def test_task_id_takes_own_ids_hashes_and_numbers(tmp_path):
    rows = [{**ROWS[0], "task_id": "mine-3"}, *ROWS[1:]]
    path = data(tmp_path / "t.jsonl", rows)
    digest = content_hash([ROWS[5]["prompt"], ROWS[5]["label"]])
    assert [t.options["index"] for t in chosen(path, "mine-3", digest, "7").tasks] == [0, 5, 7]
    with pytest.raises(ConfigError, match="no such task"):
        chosen(path, "mine-4")


# -- records -------------------------------------------------------------------------------------------


def described(path):
    config = load_eval_config(["--eval-prompt-data", "t", path, "--hf-checkpoint", "demo"])
    return identity(config, held_out_sets(config), {})


def test_a_moved_file_holds_the_same_tasks(tmp_path):
    one, other = described(data(tmp_path / "a" / "t.jsonl", ROWS)), described(data(tmp_path / "b" / "u.jsonl", ROWS))
    refuse_other(one, other, tmp_path)
    with pytest.raises(ConfigError, match="the list of tasks is another one"):
        refuse_other(one, described(data(tmp_path / "b" / "v.jsonl", ROWS[1:])), tmp_path)


def evaluation(folder, path, score, name="t"):
    """An evaluation of every row of a file, with `score(prompt)` as success."""
    config = load_eval_config(["--eval-prompt-data", name, path, "--hf-checkpoint", "demo"])
    (held_out,) = held_out_sets(config)
    folder.mkdir()
    lines = []
    for n, task in enumerate(held_out.tasks):
        env = PromptEnv(path)
        prompt = env.reset(options=task.options)[0]
        won = score(prompt)
        trajectory = Trajectory(
            trajectory_id=f"t-{n:06d}-000", group_id="g", task=task, segments=[], reward=float(won), success=won,
            messages=[{"role": "user", "content": prompt}, {"role": "assistant", "content": "x"}],
            stop_reason=StopReason.DONE, error=None, num_turns=1, agent="agent", info={"turns": []}, timings={},
        )  # fmt: skip
        lines.append(json.dumps({**to_record(trajectory), "set": name}) + "\n")
    (folder / "trajectories.jsonl").write_text("".join(lines))
    (folder / "run.json").write_text(json.dumps({"evaluation": identity(config, [held_out], {})}))
    return str(folder)


def test_comparison_pairs_the_same_questions_after_rows_were_added(tmp_path, capsys):
    def right(prompt):
        return "1" in prompt

    a = evaluation(tmp_path / "A", data(tmp_path / "a" / "t.jsonl", ROWS), right)
    new = [{"prompt": "new 1?", "label": "x"}, {"prompt": "newer?", "label": "y"}]
    b = evaluation(tmp_path / "B", data(tmp_path / "b" / "t.jsonl", new + ROWS), right)
    assert main(["compare", a, b]) == 2
    assert "--intersect compares the 20 that are in both" in capsys.readouterr().err
    assert main(["compare", a, b, "--intersect"]) == 0
    out = capsys.readouterr().out
    assert "the same in every task" in out and "the data files differ" in out


def test_a_file_of_another_name_is_compared_with_it(tmp_path, capsys):
    path = data(tmp_path / "t.jsonl", ROWS)
    a, b = (evaluation(tmp_path / name, path, lambda prompt: "1" in prompt, name) for name in ("one", "other"))
    assert main(["compare", a, b]) == 0
    out = capsys.readouterr().out
    assert "20 tasks" in out and "the same in every task" in out


def test_comparison_says_when_a_question_changed_under_its_id(tmp_path, capsys):
    rows = [{**row, "task_id": f"mine-{n}"} for n, row in enumerate(ROWS)]
    a = evaluation(tmp_path / "A", data(tmp_path / "a" / "t.jsonl", rows), bool)
    rows[4] |= {"prompt": "Another?"}
    b = evaluation(tmp_path / "B", data(tmp_path / "b" / "t.jsonl", rows), bool)
    assert main(["compare", a, b]) == 2
    assert "1 tasks have the same id but another prompt (mine-4)" in capsys.readouterr().err
    assert main(["compare", a, b, "--force"]) == 0
    assert "another prompt" in capsys.readouterr().out


# -- rows that can never be right ----------------------------------------------------------------------


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "a"}, "no key 'label'; the row has 'prompt'"),
        ({"prompt": "a", "label": None}, "'label' is None"),
        ({"prompt": "a", "label": math.nan}, "'label' is nan"),
        ({"prompt": "a", "label": {"ground_truth": "b"}}, "'label' is {'ground_truth': 'b'}"),
        ({"prompt": "a", "label": []}, "'label' is []"),
        ({"prompt": "a", "label": ["b", None]}, "the reward compares with it"),
        ({"prompt": "", "label": "b"}, "the prompt 'prompt' is empty"),
        ({"prompt": " \n", "label": "b"}, "the prompt 'prompt' is empty"),
        (
            {"prompt": [{"role": "wizard", "content": "a"}], "label": "b"},
            "unknown role 'wizard'; expected one of system",
        ),
        ({"prompt": [{"role": "user", "content": "  "}], "label": "b"}, "is empty"),
        ({"prompt": [{"role": "system", "content": "be"}], "label": "b"}, "is empty"),
        (
            {"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "label": "b"},
            "ends with a turn of the assistant",
        ),
    ],
)
def test_a_row_that_can_never_be_right_is_refused_by_line(tmp_path, row, said, streaming):
    path = data(tmp_path / "t.jsonl", [ROWS[0], row])
    with pytest.raises(DataError) as caught:
        PromptEnv(path, streaming=streaming, cache_dir=str(tmp_path / "cache"))
    assert f"{path}:2: " in str(caught.value) and said in str(caught.value)


@pytest.mark.parametrize("label", ["b", "", 3, 0.5, True, ["b", 3]])
def test_labels_that_can_be_compared_are_taken(tmp_path, label):
    assert PromptEnv(data(tmp_path / "t.jsonl", [{"prompt": "a", "label": label}])).num_tasks("train") == 1


def test_a_reward_of_ones_own_may_do_without(tmp_path):
    rows = [{"prompt": "a", "label": {"any": "thing"}}, {"prompt": "b"}]
    assert PromptEnv(data(tmp_path / "t.jsonl", rows), reward=lambda text, answer: 1.0).num_tasks("train") == 2
    with pytest.raises(DataError, match="t.jsonl:1: 'label'"):
        PromptEnv(data(tmp_path / "t.jsonl", rows), reward=[(1.0, "math"), lambda text, answer: 1.0])


@pytest.mark.parametrize("answer", [None, math.nan, {"a": 1}])
@pytest.mark.parametrize("reward", ["exact_match", "f1", "math", "dapo"])
async def test_a_comparison_with_nothing_is_an_error_and_no_score(reward, answer):
    with pytest.raises(EnvError, match="the task's answer is"):
        await RewardSet(reward)("Answer: 3", answer, row={})
