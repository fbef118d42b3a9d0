"""``agentrl show``: what is selected, how it looks, and that nothing of a model reaches the terminal as control."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from agentrl.cli.main import main
from agentrl.data.records import to_record
from agentrl.data.store import TrajectoryStore
from agentrl.evaluation.results import load
from agentrl.evaluation.transcript import render, runs, select
from agentrl.types import Segment, StopReason, Task, Trajectory

DEMO = Path(__file__).parents[2] / "agentrl" / "assets" / "demo"


def segment(parts):
    """A segment of ``(text, mask)`` in the demo model's tokens."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    pieces = [(tokenizer.encode(text, add_special_tokens=False).ids, mask) for text, mask in parts]
    tokens = np.array([i for ids, _ in pieces for i in ids], np.int32)
    mask = np.array([m for ids, m in pieces for _ in ids], np.uint8)
    return Segment(tokens, mask, np.where(mask, -0.1, 0).astype(np.float32), np.where(mask, 3, -1).astype(np.int32), 4)


def episode(number=0, *, success=True, with_tokens=True, **changes):
    calls = [{"id": "c", "type": "function", "function": {"name": "search", "arguments": {"query": "Ann"}}}]
    values = {
        "trajectory_id": f"eval-search-{number:06d}-000",
        "group_id": f"eval-search-{number:06d}",
        "task": Task(f"search/test/{number}", seed=0, split="test", env="search"),
        "segments": [
            segment([("who is Ann?", 0), ("<tool_call>search Ann</tool_call>", 1), ("Ann is a baker", 0), ("baker", 1)])
        ]
        if with_tokens
        else [],
        "messages": [
            {"role": "user", "content": "who is Ann?"},
            {"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": calls},
            {"role": "tool", "content": "Ann is a baker"},
            {"role": "assistant", "content": "a baker"},
        ],
        "reward": 1.5,
        "rewards": {"match": 1.0, "style": 0.5},
        "turn_rewards": [0.5, 1.0],
        "success": success,
        "num_turns": 2,
        "tool_calls": [{"turn": 1, "name": "search", "arguments": {"query": "Ann"}, "error": "timeout"}],
        "info": {"turns": [{"sampled_tokens": 7}, {"sampled_tokens": 2}], "answer": "a baker"},
        "timings": {},
    }
    return Trajectory(**{**values, **changes})


def write(folder, *episodes, config=None):
    folder.mkdir(parents=True)
    lines = [json.dumps({**to_record(e), "set": "search"}) + "\n" for e in episodes]
    (folder / "trajectories.jsonl").write_text("".join(lines))
    (folder / "config.json").write_text(json.dumps({"hf_checkpoint": "demo"} if config is None else config))
    return str(folder)


def shown(capsys, *words, code=0):
    assert main(["show", *words]) == code
    captured = capsys.readouterr()
    return captured.out if code == 0 else captured.err


def test_an_episode_turn_by_turn_in_tokens(tmp_path, capsys):
    out = shown(capsys, write(tmp_path / "run", episode()))
    assert out.splitlines() == [
        "━━ search · task search/test/0 · episode 0",
        "│ who is Ann?",
        "▌ <tool_call>search Ann</tool_call>",
        "   turn 1 · reward 0.5 · 7 tokens · called search failed: timeout",
        "│ Ann is a baker",
        "▌ baker",
        "   turn 2 · reward 1 · 2 tokens",
        "success · reward 1.5 (match 1, style 0.5) · 2 turns · stopped: done (completed)",
        "right answer: a baker",
        "",
        "1 of 1 episodes.",
    ]
    assert "\x1b" not in out  # no colours where nobody sees them


def test_messages_where_there_are_no_tokens_or_no_tokenizer(tmp_path, capsys):
    expected = [
        "│ user: who is Ann?",
        "▌ assistant: <think>hm</think>",
        "▌ I look.",
        "▌ → search({'query': 'Ann'})",
        "   turn 1 · reward 0.5 · 7 tokens · called search failed: timeout",
        "│ tool: Ann is a baker",
        "▌ assistant: a baker",
    ]
    run = write(tmp_path / "served", episode(with_tokens=False))
    assert shown(capsys, run).splitlines()[1:8] == expected
    assert "holds no tokens: a server kept them" in shown(capsys, run, "--tokens", code=2)
    run = write(tmp_path / "lost", episode(), config={"hf_checkpoint": str(tmp_path / "gone")})
    assert shown(capsys, run).splitlines()[1:8] == expected
    assert "no tokenizer.json in" in shown(capsys, run, "--tokens", code=2)
    assert "¦" in shown(capsys, run, "--tokens", "--hf-checkpoint", str(DEMO))
    run = write(tmp_path / "here", episode())
    assert shown(capsys, run, "--no-tokens").splitlines()[1:8] == expected


def test_examples_in_the_prompt_are_not_the_models_own(tmp_path, capsys):
    example = [{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "2"}]
    shot = episode(with_tokens=False, messages=[*example, *episode(with_tokens=False).messages])
    lines = shown(capsys, write(tmp_path / "run", shot)).splitlines()
    assert lines[2] == "│ assistant: 2" and lines[4] == "▌ assistant: <think>hm</think>"


def test_colours_in_a_terminal(tmp_path):
    run = write(tmp_path / "run", episode())
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system="standard", width=80)
    for line in render(select(load(run))[0]):
        console.print(line)
    assert "\x1b[32m▌ I look." in out.getvalue() and "\x1b[2m│ user" in out.getvalue()


def test_stretches_of_a_mask():
    found = [("".join(map(str, ids)), trained) for ids, trained in runs(segment([("a", 1), ("b", 0), ("c", 1)]))]
    assert [trained for _, trained in found] == [True, False, True]
    assert list(runs(segment([]))) == []


def test_a_rewritten_history_is_a_new_segment(tmp_path, capsys):
    two = [segment([("who is Ann?", 0), ("one", 1)]), segment([("who is Ann?", 0), ("two", 1)])]
    out = shown(capsys, write(tmp_path / "run", episode(segments=two)))
    assert out.index("▌ one") < out.index("a new segment") < out.index("▌ two")
    assert "turn 2" in out


# -- selection ------------------------------------------------------------------------------------------


def test_failed_by_task_by_place_and_limit(tmp_path, capsys):
    broken = episode(
        2, success=None, stop_reason=StopReason.ENGINE_ERROR, error="EngineError: gone (a.py:3 in f)", reward=0.0
    )
    episodes = [episode(0), episode(1, success=False), broken, *(episode(i) for i in range(3, 20))]
    run = write(tmp_path / "run", *episodes)
    out = shown(capsys, run)
    assert "3 of 20 episodes. Others: --index, --task, --limit." in out and "search/test/3" not in out
    assert "20 of 20 episodes." in shown(capsys, run, "--limit", "100")
    out = shown(capsys, run, "--failed")
    assert "2 of 2 failed episodes." in out and "no success" in out
    assert "not scored" in out and "error: EngineError: gone" in out and "engine_error (infra_error)" in out
    assert "task search/test/17 ·" in shown(capsys, run, "--task", "17")
    assert "task search/test/17 ·" in shown(capsys, run, "--task", "search/test/17")
    assert "task search/test/2 ·" in shown(capsys, run, "--failed", "--index", "1")
    assert "there are 2 such episodes" in shown(capsys, run, "--failed", "--index", "2", code=2)
    error = shown(capsys, run, "--task", "search/tset/17", code=2)
    assert "no task 'search/tset/17' among 20. Did you mean 'search/test/17'?" in error
    assert "has no set 'nope'; it has search" in shown(capsys, run, "--set", "nope", code=2)


def test_steps_and_sets_of_a_training_run(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text('{"hf_checkpoint": "demo"}')
    store = TrajectoryStore(tmp_path / "run" / "trajectories")
    store.write(0, [episode(0)], name="eval-search")
    store.write(4, [episode(0), episode(1)], name="eval-search")
    store.write(3, [episode(7)], name="train")
    run = str(tmp_path / "run")
    assert "2 of 2 episodes" in shown(capsys, run, "--set", "search")
    assert "1 of 1 episodes" in shown(capsys, run, "--step", "0")
    out = shown(capsys, run, "--set", "train", "--step", "3")
    assert "━━ train · task search/test/7 · episode 0" in out and "▌ baker" in out
    assert "no evaluation after step 9" in shown(capsys, run, "--step", "9", code=2)


def test_agents_of_an_episode_are_shown_together(tmp_path, capsys):
    pair = [
        episode(agent=a, trajectory_id=f"e0:{a}", info={"episode_id": "e0", "turns": []}) for a in ("seller", "buyer")
    ]
    out = shown(capsys, write(tmp_path / "run", *pair))
    assert "episode 0 · seller" in out and "episode 0 · buyer" in out and "1 of 1 episodes" in out


@pytest.mark.parametrize("words, text", [([], "needs one run"), (["a", "b"], "got 2"), (["/nope"], "no such run")])
def test_a_run_must_be_named(capsys, words, text):
    assert text in shown(capsys, *words, code=2)


def test_empty_and_damaged_runs(tmp_path, capsys):
    run = write(tmp_path / "empty")
    assert "0 of 0 episodes." in shown(capsys, run)
    run = write(tmp_path / "torn", episode())
    with (tmp_path / "torn" / "trajectories.jsonl").open("a") as stream:
        stream.write('{"half": ')  # a killed writer's last line
    assert "1 of 1 episodes." in shown(capsys, run)
    (tmp_path / "torn" / "trajectories.jsonl").write_text('{"schema_version": 1}\n')
    assert "trajectories.jsonl:1" in shown(capsys, run, code=2)


# -- safety ---------------------------------------------------------------------------------------------


EVIL = "\x1b]0;owned\x07\x1b[2J\r\x08\x9b1A\u202eevil\u2028\x00 [bold]not markup[/bold]"


@pytest.mark.parametrize("with_tokens", [True, False])
def test_control_characters_of_a_model_never_reach_the_terminal(tmp_path, capsys, with_tokens):
    evil = episode(
        segments=[segment([("q", 0), (EVIL, 1)])] if with_tokens else [],
        messages=[{"role": "user", "content": EVIL}, {"role": EVIL, "content": EVIL}],
        task=Task(EVIL, seed=0),
        rewards={EVIL: 1.0},
        error=EVIL,
        info={"turns": [], "answer": EVIL},
        tool_calls=[{"turn": 1, "name": EVIL, "error": EVIL}],
    )
    out = shown(capsys, write(tmp_path / "run", evil))
    assert not any(c in out for c in "\x1b\x07\r\x08\x9b\u202e\u2028\x00")
    assert r"\x1b]0;owned\x07" in out and "[bold]not markup[/bold]" in out


def test_the_first_episode_of_a_run_is_as_harmless():
    from agentrl.processes.signals import printable
    from agentrl.progress import episode_panel

    out = io.StringIO()
    Console(file=out, width=80).print(episode_panel(episode(messages=[{"role": "user", "content": EVIL}]), "t"))
    assert not any(c in out.getvalue() for c in "\x1b\x07\r\x08\x9b\u202e\u2028\x00")
    assert printable("tab\there\nand ünïcode 漢字 🙂") == "tab\there\nand ünïcode 漢字 🙂"
    assert printable("\ud800") == r"\ud800"
