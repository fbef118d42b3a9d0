"""The built-in environment ``calculator``: tasks, an oracle, other policies, data of one's own."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import agentrl
from agentrl.envs.builtin.calculator import PEOPLE, THINGS, CalculatorEnv
from agentrl.errors import ConfigError, DataError


def call(expression: str) -> str:
    return f"<tool_call>{json.dumps({'name': 'calculator', 'arguments': {'expression': expression}})}</tool_call>"


def play(env: agentrl.Env, split: str, index: int, policy) -> tuple[float, bool]:
    env.reset(options={"split": split, "index": index})
    total, observation, over = 0.0, "", False
    while not over:
        observation, reward, terminated, truncated, info = env.step(policy(env.row, observation))
        total, over = total + reward, terminated or truncated
    return total, info["success"]


def oracle(row: dict, observation: str) -> str:
    return f"Answer: {observation}" if observation else call(row["expression"])


def test_an_oracle_solves_everything_and_others_do_not():
    env = CalculatorEnv()
    for split in env.splits:
        assert {play(env, split, index, oracle) for index in range(120)} == {(1.0, True)}
    assert {play(env, "test", index, lambda *_: "") for index in range(24)} == {(0.0, False)}
    assert {play(env, "test", index, lambda *_: "Answer: 7") for index in range(24)} == {(0.0, False)}
    # The expression alone is no answer, and neither is one of the numbers of the story.
    last = {play(env, "test", i, lambda row, _: re.findall(r"\d+", row["prompt"])[-1])[1] for i in range(24)}
    assert last == {False}


def test_an_answer_with_decimals_may_be_written_in_several_ways():
    env = CalculatorEnv(difficulty="hard")
    index = next(i for i in range(100) if re.search(r"\.\d[1-9]$", env.tasks["test"][i]["answer"]))
    answer = env.tasks["test"][index]["answer"]
    for text in (f"Answer: {answer}", f"It is ${float(answer):,.2f}", f"\\boxed{{{answer}}}", f"= {answer}0 dollars"):
        assert play(env, "test", index, lambda *_, text=text: text) == (1.0, True), text
    assert play(env, "test", index, lambda *_: f"Answer: {float(answer) + 0.5}")[1] is False


def test_train_and_test_share_nothing():
    env = CalculatorEnv()
    rows = {split: [env.tasks[split][i] for i in range(env.num_tasks("test"))] for split in env.splits}
    assert not {row["expression"] for row in rows["train"]} & {row["expression"] for row in rows["test"]}
    assert not set(PEOPLE["train"]) & set(PEOPLE["test"]) and not set(THINGS["train"]) & set(THINGS["test"])
    for split, other in (("train", "test"), ("test", "train")):
        words = set(re.findall(r"\w+", " ".join(row["prompt"] for row in rows[split])))
        assert not words & set(PEOPLE[other]) and not words & set(THINGS[other])


def test_tasks_are_a_function_of_seed_and_index_and_levels_take_turns():
    first, again, other = CalculatorEnv(), CalculatorEnv(), CalculatorEnv(task_seed=1)
    assert [first.tasks["train"][i] for i in range(50)] == [again.tasks["train"][i] for i in range(50)]
    assert [first.tasks["train"][i]["prompt"] for i in range(50)] != [
        other.tasks["train"][i]["prompt"] for i in range(50)
    ]
    assert [first.tasks["test"][i]["category"] for i in range(6)] == ["easy", "medium", "hard"] * 2
    hard = CalculatorEnv(difficulty="hard+easy")
    assert {hard.tasks["test"][i]["category"] for i in range(20)} == {"easy", "hard"}
    _, info = hard.reset(options={"split": "test", "index": 0})
    assert (info["category"], info["task_id"]) == ("easy", "calculator-0/test/0")


def test_first_prompts_are_short():
    from agentrl.demo import MODEL_DIR

    tokenizer = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(MODEL_DIR)
    env = CalculatorEnv()
    for index in range(24):
        _, info = env.reset(options={"split": "test", "index": index})
        text = tokenizer.apply_chat_template(info["messages"], tools=info["tools"], tokenize=False)
        assert len(tokenizer(text)["input_ids"]) < 400


def test_problems_of_ones_own(tmp_path: Path):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"question": "2 + 2?", "gold": 4, "category": "tiny"}\n')
    env = agentrl.make("calculator", train_data=str(path), test_data=str(path), input_key="question", label_key="gold")
    observation, info = env.reset(options={"split": "test", "index": 0})
    assert (observation, info["category"], env.num_tasks("train")) == ("2 + 2?", "tiny", 1)
    assert env.step("4")[1] == 1.0
    with pytest.raises(DataError, match="1 of 1 rows have no answer in the column 'label'"):
        CalculatorEnv(train_data=path, input_key="question")
    with pytest.raises(DataError, match="no key 'prompt'"):
        CalculatorEnv(test_data=path)
    assert CalculatorEnv(test_data=path, input_key="question", label_key="gold").num_tasks("train") == 0


@pytest.mark.parametrize(
    "arguments", [{"difficulty": "extreme"}, {"difficulty": ""}, {"task_seed": -1}, {"task_seed": "x"}]
)
def test_impossible_settings_are_refused(arguments: dict):
    with pytest.raises(ConfigError, match=next(iter(arguments))):
        CalculatorEnv(**arguments)


def test_what_a_tool_says_earns_nothing():
    env = CalculatorEnv()
    env.reset(options={"split": "test", "index": 0})
    observation, reward, terminated, _, _ = env.step(call(env.row["expression"]))
    assert (observation, reward, terminated) == (env.row["answer"], 0.0, False)
    assert env.step("I do not know")[1] == 0.0
