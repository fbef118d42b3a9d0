"""Worlds of the text adventure: how they are drawn, and what can be done in them.

Everything a player can do only ever adds to what it has (nothing can be dropped, no door falls shut), so a world
can always be finished, from wherever the player has got to.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from agentrl.loading import toml_beside

_DATA = toml_beside(__file__, "world.toml")
ROOMS, THINGS, MATERIALS = _DATA["rooms"], _DATA["things"], _DATA["materials"]
DIRECTIONS = {"north": (0, 1), "south": (0, -1), "east": (1, 0), "west": (-1, 0)}
OPPOSITE = {"north": "south", "south": "north", "east": "west", "west": "east"}


@dataclass(frozen=True)
class Level:
    """How hard a world is. ``shortest`` and ``longest`` bound the turns that the best player needs."""

    rooms: int
    door: bool
    chest: bool
    bring: bool  # the thing is to be brought to a room, not only found
    litter: int  # things that are of no use
    shortest: int
    longest: int


LEVELS = {name: Level(**level) for name, level in _DATA["levels"].items()}


@dataclass(frozen=True)
class State:
    """What changes in the course of a game."""

    room: str
    held: frozenset[str] = frozenset()
    unlocked: bool = False
    opened: bool = False


@dataclass(frozen=True)
class World:
    """A map with things in it.

    Attributes:
        exits: room -> direction -> room.
        places: thing -> the room it lies in, or ``chest``.
        door: the two rooms between which a door is locked, if any; ``key`` opens it.
        chest: the room with the chest, if there is one.
        wanted: the thing to get, and ``target`` the room to bring it to, if it must be brought.
    """

    start: str
    exits: dict[str, dict[str, str]]
    places: dict[str, str]
    wanted: str
    target: str | None = None
    door: frozenset[str] = frozenset()
    key: str | None = None
    chest: str | None = None

    @property
    def first(self) -> State:
        return State(self.start)

    def done(self, state: State) -> bool:
        return self.wanted in state.held and self.target in (None, state.room)

    def locked(self, state: State, direction: str) -> bool:
        """Whether the exit in that direction is the locked door."""
        return not state.unlocked and {state.room, self.exits[state.room][direction]} == self.door

    def visible(self, state: State) -> list[str]:
        """Things that can be taken here, in a fixed order."""
        here = {state.room} | ({"chest"} if state.opened and self.chest == state.room else set())
        return [thing for thing, place in self.places.items() if place in here and thing not in state.held]

    def moves(self, state: State) -> Iterator[tuple[str, State]]:
        """Every command that changes something, with what it leads to."""
        for direction, room in self.exits[state.room].items():
            if not self.locked(state, direction):
                yield f"go {direction}", replace(state, room=room)
            elif self.key in state.held:
                yield "unlock door", replace(state, unlocked=True)
        if self.chest == state.room and not state.opened:
            yield "open chest", replace(state, opened=True)
        for thing in self.visible(state):
            yield f"take {thing}", replace(state, held=state.held | {thing})

    def plan(self, state: State) -> list[str]:
        """The shortest commands that finish the game from here (breadth first; useless things are left alone)."""
        useful = {self.wanted, self.key}
        came: dict[State, tuple[State, str] | None] = {state: None}
        waiting = deque([state])
        while waiting:
            at = waiting.popleft()
            if self.done(at):
                commands = []
                while (step := came[at]) is not None:
                    at, command = step
                    commands.append(command)
                return commands[::-1]
            for command, following in self.moves(at):
                if following not in came and following.held <= state.held | useful:
                    came[following] = (at, command)
                    waiting.append(following)
        raise RuntimeError("a world that cannot be finished was made")

    @property
    def signature(self) -> str:
        """The world as text, the same for equal ones."""
        exits = sorted((room, sorted(ways.items())) for room, ways in self.exits.items())
        places = sorted(self.places.items())
        return repr((self.start, exits, places, self.wanted, self.target, sorted(self.door), self.key, self.chest))


def make_world(split: str, index: int, level: str) -> World:
    """World ``index`` of a split. A quarter of all worlds, by the hash of their content, are held out for ``test``."""
    rng = np.random.default_rng([zlib.crc32(f"{split}/{level}".encode()), index])
    bounds = LEVELS[level]
    while True:
        world = _draw(rng, bounds)
        held_out = zlib.crc32(world.signature.encode()) % 4 == 0
        if held_out == (split == "test") and bounds.shortest <= len(world.plan(world.first)) <= bounds.longest:
            return world


def _draw(rng: np.random.Generator, level: Level) -> World:
    names = [ROOMS[i] for i in rng.permutation(len(ROOMS))[: level.rooms]]
    cells = {(0, 0): names[0]}
    exits: dict[str, dict[str, str]] = {name: {} for name in names}
    for name in names[1:]:  # a tree: each room hangs on an earlier one
        while name not in cells.values():
            (x, y), parent = list(cells.items())[int(rng.integers(len(cells)))]
            direction = list(DIRECTIONS)[int(rng.integers(4))]
            dx, dy = DIRECTIONS[direction]
            if (x + dx, y + dy) not in cells:
                cells[x + dx, y + dy] = name
                exits[parent][direction] = name
                exits[name][OPPOSITE[direction]] = parent
    things = [THINGS[i] for i in rng.permutation(len(THINGS))]
    materials = [MATERIALS[i] for i in rng.permutation(len(MATERIALS))]
    wanted = f"{materials[0]} {things[0]}"
    if not level.door:
        places = {wanted: names[int(rng.integers(1, len(names)))]}
        _scatter(rng, things[1:], names, places, level.litter)
        return World(names[0], exits, places, wanted)
    # The door cuts off one branch of the tree; what is wanted lies behind it, the key in front.
    behind = _branch(exits, names[0], names[int(rng.integers(1, len(names)))])
    front = [name for name in names if name not in behind]
    root = next(name for name in names if name in behind)
    parent = next(room for room in exits[root].values() if room in front)
    key = f"{materials[1]} key"
    chest = front[int(rng.integers(len(front)))] if level.chest else None
    places = {
        wanted: behind[int(rng.integers(len(behind)))],
        key: "chest" if chest else front[int(rng.integers(len(front)))],
    }
    _scatter(rng, things[1:], names, places, level.litter)
    target = front[int(rng.integers(len(front)))] if level.bring else None
    return World(names[0], exits, places, wanted, target, frozenset({root, parent}), key, chest)


def _scatter(rng: np.random.Generator, things: list[str], rooms: list[str], places: dict[str, str], n: int) -> None:
    for thing in things[:n]:
        places[thing] = rooms[int(rng.integers(len(rooms)))]


def _branch(exits: dict[str, dict[str, str]], start: str, root: str) -> list[str]:
    """The rooms that cannot be reached from ``start`` without passing ``root``, ``root`` among them."""
    reached, waiting = {start}, [start]
    while waiting:
        for room in exits[waiting.pop()].values():
            if room not in reached and room != root:
                reached.add(room)
                waiting.append(room)
    return [room for room in exits if room not in reached]
