"""The README's promise: an Env, a Tool and a reward in at most 30 lines of the user's, and it plays."""

from __future__ import annotations

from pathlib import Path


def test_the_example_is_short_enough():
    assert len((Path(__file__).parent / "example_env.py").read_text().splitlines()) <= 30


def test_what_is_held_out_is_never_trained_on(example_spec):
    import agentrl

    env = agentrl.make(example_spec)
    asked = {
        split: {frozenset(_items(env.reset(options={"split": split, "index": i})[0])) for i in range(300)}
        for split in ("train", "test")
    }
    assert (len(asked["train"]), len(asked["test"])) == (20, 10)
    assert not frozenset().union(*asked["train"]) & frozenset().union(*asked["test"])


def _items(observation: str) -> list[str]:
    return observation.removeprefix("What do ").removesuffix(" cost together?").split(", ")


def test_the_example_plays(example_spec):
    import agentrl

    env = agentrl.make(example_spec)
    observation, info = env.reset(options={"split": "test", "index": 0})
    assert [t["function"]["name"] for t in info["tools"]] == ["price"]
    items = _items(observation)
    calls = "".join(f'<tool_call>{{"name": "price", "arguments": {{"item": "{item}"}}}}</tool_call>' for item in items)
    observation, reward, terminated, _, _ = env.step(calls)
    assert (reward, terminated) == (0.0, False)
    total = sum(int(line) for line in observation.splitlines())
    assert env.step(str(total))[1:3] == (1.0, True)
