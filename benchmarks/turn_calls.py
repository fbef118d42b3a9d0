"""Python calls and files of this package that one tool turn crosses, from an answer of the engine to the next request.

The real loop, client, ToolEnv and tool with the scripted engine of ``turn_cost.py``; counted by ``sys.setprofile``, so
that resuming a coroutine is a call too. The count is exact: it does not depend on the machine.

    python benchmarks/turn_calls.py [--each]

Prints one JSON object and one line. Target: half of what version 0.1 took (261 calls).
"""

from __future__ import annotations

import asyncio
import collections
import json
import sys
from types import FrameType

import turn_cost
from client_cpu import english, make_chat
from turn_cost import ScriptedEngine, play

TARGET = 130


class Counting(ScriptedEngine):
    """Counts between its answers."""

    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    by_turn: list[collections.Counter[tuple[str, str]]] = []

    async def _exchange(self, payload: bytes, key: str, seconds: float) -> bytes:
        sys.setprofile(None)
        self.by_turn.append(self.counts.copy())
        await asyncio.sleep(0)
        self.counts.clear()
        sys.setprofile(self.note)
        return self._answer

    @classmethod
    def note(cls, frame: FrameType, event: str, _: object) -> None:
        _, found, file = frame.f_code.co_filename.rpartition("/agentrl/")
        if event == "call" and found:
            cls.counts[file, frame.f_code.co_name] += 1


def main() -> int:
    words = english()
    turn_cost.ScriptedEngine = Counting  # type: ignore[misc]
    asyncio.run(play(make_chat(words), words, 2, 8))
    sys.setprofile(None)
    counts = Counting.by_turn[11]  # in the second episode, when every cache is warm
    calls, files = counts.total(), len({file for file, _ in counts})
    if "--each" in sys.argv:
        for (file, name), number in sorted(counts.items(), key=lambda item: -item[1]):
            print(f"{number:4} {file} {name}")
    print(json.dumps({"benchmark": "turn_calls", "calls": calls, "files": files, "target": TARGET}))
    print(f"a tool turn crosses {calls} calls of this package in {files} files; target {TARGET} calls")
    return int(calls > TARGET)


if __name__ == "__main__":
    sys.exit(main())
