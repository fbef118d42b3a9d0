"""A wall clock that jumps moves no deadline: it is only written down."""

from __future__ import annotations

import ast
from pathlib import Path

import agentrl

PACKAGE = Path(agentrl.__file__).parent
READS = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow"), ("date", "today")}
WRITTEN_DOWN = {
    "data/run_folder.py": "when a start and a line of metrics was",
    "data/tracking.py": "TensorBoard's events",
    "chat_api/client.py": "a server that says until when to wait, as a date; what it may ask for is bounded",
    "orchestrator/chaos.py": "when a step was logged, by another process",
}


def test_nothing_but_records_reads_the_wall_clock() -> None:
    found = {
        str(file.relative_to(PACKAGE))
        for file in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and (node.value.id, node.attr) in READS
        or isinstance(node, ast.ImportFrom) and any((node.module, each.name) in READS for each in node.names)
    }
    assert found == set(WRITTEN_DOWN), "time.monotonic() where something waits or is measured"
