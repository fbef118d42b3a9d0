"""The rooms of the package: none imports from a room above its own. docs/architecture.md says what each is for."""

import ast
from pathlib import Path

import pytest

import agentrl

FLOORS = [
    "errors types redaction on_demand _gymnasium spaces",
    "loading",
    "versions concurrency families values jsonl",
    "config processes",
    "algorithms tasks retrieval sandbox chat_api engines progress",
    "tools rewards weights",
    "data",
    "envs trainer",
    "rollout",
    "evaluation serving planning",
    "orchestrator runs",
    "demo",
    "cli",
    "__main__",
]
"""From the ground up; a room may import those below it, and not those beside it."""
BESIDE = {("envs", "_gymnasium")}
FLOOR = {room: number for number, floor in enumerate(FLOORS) for room in floor.split()}
PACKAGE = Path(agentrl.__file__).parent


def imports(file: Path) -> set[str]:
    """Rooms that a module imports, at any place in it, for types too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{name.name}" for name in node.names}
    return {name.split(".")[1] for name in names if name.startswith("agentrl.")}


def room_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("room", sorted({room_of(file) for file in PACKAGE.rglob("*.py")} - {"__init__"}))
def test_no_room_imports_from_above(room):
    files = [file for file in PACKAGE.rglob("*.py") if room_of(file) == room]
    upward = {
        f"{file.relative_to(PACKAGE)} imports {other}"
        for file in files
        for other in imports(file) - {room, "__version__"}
        if FLOOR[other] >= FLOOR[room] and (room, other) not in BESIDE
    }
    assert not upward
