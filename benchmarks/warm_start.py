"""A warm start: the embedded model learns conversations of an oracle, and is then evaluated as an agent.

Writes what an oracle says that knows the facts of the search environment's world, learns it by ``agentrl train
--loss-type sft_loss``, and evaluates the last checkpoint by ``agentrl eval --run`` on held-out tasks::

    python benchmarks/warm_start.py

Targets: the held-out loss falls, and at least 90 % of the held-out tasks are solved, in the episodes of an engine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import agentrl
from agentrl.envs.builtin.search.env import search_tool_schema
from agentrl.envs.builtin.search.world import RELATIONS, get_world

LIMIT_S = 1800.0
REACHED = 0.9


def conversations(indices: range) -> list[dict]:
    """What the oracle says to the training questions of these numbers, and what the environment answers."""
    env, world, rows = agentrl.make("search"), get_world(), []
    for index in indices:
        question = world.question("train", index)
        asked, _ = env.reset(options={"split": "train", "index": index})
        messages = [{"role": "system", "content": env.system_prompt}, {"role": "user", "content": asked}]
        for subject, relation in zip(question.chain, question.path, strict=False):
            call = {"name": "search", "arguments": {"query": RELATIONS[relation].phrase.format(subject)}}
            found = env.step(f"<tool_call>{json.dumps(call)}</tool_call>")[0]
            messages.append({"role": "assistant", "content": "", "tool_calls": [{"function": call}]})
            messages.append({"role": "tool", "name": "search", "content": found})
        messages.append({"role": "assistant", "content": f"Answer: {question.answer}"})
        assert env.step(messages[-1]["content"])[1] == 1.0, question
        rows.append({"messages": messages, "tools": [search_tool_schema()]})
    return rows


def agentrl_says(*words: str) -> None:
    """Run a command of agentrl to its end."""
    done = subprocess.run(
        [sys.executable, "-m", "agentrl.cli.main", *words], capture_output=True, text=True, timeout=LIMIT_S
    )
    if done.returncode:
        said = (done.stdout + done.stderr)[-3000:]
        raise SystemExit(f"agentrl {' '.join(words)} ended with {done.returncode}:\n{said}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=2000)
    args = parser.parse_args()
    batch = 32
    steps = args.conversations // batch
    with tempfile.TemporaryDirectory(prefix="agentrl-bench-") as name:
        folder = Path(name)
        parts = {"chats": range(args.conversations), "held_out": range(5000, 5100)}
        for part, indices in parts.items():
            lines = (json.dumps(row) + "\n" for row in conversations(indices))
            (folder / f"{part}.jsonl").write_text("".join(lines))
        agentrl_says(
            "train", "--loss-type", "sft_loss", "--train-data", str(folder / "chats.jsonl"),
            "--eval-data", str(folder / "held_out.jsonl"), "--eval-interval", str(steps), "--save-interval", str(steps),
            "--rollout-batch-size", str(batch), "--num-rollout", str(steps), "--output-dir", str(folder / "run"),
        )  # fmt: skip
        lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
        losses = [line["eval/nll"] for line in lines if "eval/nll" in line]
        agentrl_says("eval", "--run", str(folder / "run"), "--env", "search", "--output-dir", str(folder / "eval"))
        summary = json.loads((folder / "eval" / "summary.json").read_text())
        solved = summary["sets"]["search"]["success"]["mean"]
    print(
        f"warm start, {args.conversations} conversations: held-out loss {losses[0]:.3f} -> {losses[-1]:.3f} nats a "
        f"token, then {solved:.1%} of the held-out tasks"
    )
    return 0 if losses[-1] < losses[0] and solved >= REACHED else 1


if __name__ == "__main__":
    sys.exit(main())
