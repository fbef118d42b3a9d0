"""``TextGameEnv``: a text adventure played with plain commands, rewarded for each step towards its end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from agentrl.envs.builtin.textgame.world import DIRECTIONS, LEVELS, State, World, make_world
from agentrl.envs.core import Env, require_number, task_index
from agentrl.tools.formats import get_parser
from agentrl.values import check_choice, chosen

COMMANDS = "go DIRECTION, take THING, open chest, unlock door, look, inventory"
SYSTEM_PROMPT = f"You play a text game. Reply with one command: {COMMANDS}."

_ARTICLES = ("the ", "a ", "an ")
_MARKS = " .!\"'`*>"
_SHORT = {name[0]: name for name in DIRECTIONS}


class TextGameEnv(Env):
    """Rooms to walk through, a thing to find, a door that may be locked and a chest that may hold its key.

    A turn is one command, the last line of what the model wrote. An observation says only what is new. The reward of
    a turn is the share of the way it covered: the best player's distance to the end before the turn, less the
    distance after it, over the distance at the start. So going back costs what going forth earned, the sum is 1
    exactly when the game is finished, and the shortest way and a detour to it earn the same.

    Args:
        difficulty: ``easy`` (4 rooms), ``medium`` (6, a locked door) or ``hard`` (9, a chest, something to be brought
            back); several joined by ``+`` take turns.
        reward: ``progress`` as above, or ``goal``: 1 for the end, 0 before.
        invalid_reward: added for a turn that is no command of the game; usually negative or 0.

    Raises:
        ConfigError: an argument is out of range.

    Example:
        >>> env = TextGameEnv(difficulty="easy")
        >>> print(env.reset(options={"split": "test", "index": 0})[0])
        Goal: find the iron mirror and take it.
        Vault. Exits: east, west. You see: shell.
        >>> env.step("open chest")[:2]
        ('There is no chest here.', 0.0)
    """

    task_counts = {"train": 10_000, "test": 500}
    max_turns = 20
    call_format = "none"

    def __init__(
        self, *, difficulty: str = "easy+medium", reward: str = "progress", invalid_reward: float = 0.0
    ) -> None:
        check_choice("reward", reward, ("progress", "goal"))
        self.levels = chosen("difficulty", difficulty, LEVELS)
        self.reward, self.invalid_reward = reward, invalid_reward

    def check_settings(self) -> None:
        super().check_settings()
        require_number(self, "invalid_reward", at_least=-1e9)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        split = self.split_of(options)
        index = task_index(self, split, options)
        level = self.levels[index % len(self.levels)]
        self.world: World = make_world(split, index, level)
        self.state: State = self.world.first
        self._length = self._left = len(self.solution())
        self._seen = {self.state.room}
        target = f"bring it to the {self.world.target}" if self.world.target else "take it"
        observation = f"Goal: find the {self.world.wanted} and {target}.\n{self._scene()}"
        messages = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": observation}]
        info = {"task_id": f"{split}/{index}", "messages": messages, "category": level, "optimal_turns": self._length}
        return observation, info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        before = self.state
        text = get_parser("none").parse(action).content
        observation, valid = self._obey(command_of(text))
        done = self.world.done(self.state)
        left = self._left if self.state == before else len(self.solution())
        earned = (self._left - left) / self._length if self.reward == "progress" else float(done)
        self._left = left
        parts = {self.reward: earned}
        if not valid:
            parts["invalid"] = float(self.invalid_reward)
        if done:
            observation = f"{observation}\nDone."
        info: dict[str, Any] = {"rewards": parts}
        if done:
            info["success"] = True
        return observation, sum(parts.values()), done, False, info

    def solution(self) -> list[str]:
        """The shortest list of commands that finishes the game from here; the model is never shown it."""
        return self.world.plan(self.state)

    # -- commands --------------------------------------------------------------------------------

    def _obey(self, command: str) -> tuple[str, bool]:
        """What a command leads to, and whether it was one of the game's. Something that cannot be done now was."""
        verb, _, rest = command.partition(" ")
        rest = rest.strip()
        direction = _SHORT.get(rest, rest) if verb == "go" else _SHORT.get(verb, verb)
        if verb == "go" or (not rest and direction in DIRECTIONS):
            return self._go(direction)
        if verb == "take" and rest:
            return self._take(rest), True
        if verb == "open" and rest in ("chest", "door"):
            return (self._open() if rest == "chest" else self._unlock()), True
        if verb == "unlock" and rest.split(" ")[0] == "door":
            return self._unlock(), True
        if command == "look":
            return self._scene(), True
        if command == "inventory":
            return f"You have: {_listed(sorted(self.state.held))}.", True
        return f"That is no command. Commands: {COMMANDS}.", False

    def _go(self, direction: str) -> tuple[str, bool]:
        exits = self.world.exits[self.state.room]
        if direction not in DIRECTIONS:
            return f"Go where? Exits: {_listed(exits)}.", False
        if direction not in exits:
            return f"You cannot go {direction} from here. Exits: {_listed(exits)}.", True
        if self.world.locked(self.state, direction):
            return f"The door to the {direction} is locked. Find the key, then: unlock door.", True
        self.state = replace(self.state, room=exits[direction])
        known = self.state.room in self._seen
        self._seen.add(self.state.room)
        return self._scene(known=known), True

    def _take(self, thing: str) -> str:
        visible = self.world.visible(self.state)
        fitting = [name for name in visible if name == thing or name.split(" ")[-1] == thing]
        if len(fitting) > 1:
            return f"Which one? {_listed(fitting)}."
        if not fitting:
            have = " You have it." if any(thing in (name, name.split(" ")[-1]) for name in self.state.held) else ""
            return f"There is no {thing} here to take.{have} You see: {_listed(visible)}."
        self.state = replace(self.state, held=self.state.held | {fitting[0]})
        return f"You take the {fitting[0]}."

    def _open(self) -> str:
        if self.world.chest != self.state.room:
            return "There is no chest here."
        if self.state.opened:
            return "The chest is open already."
        self.state = replace(self.state, opened=True)
        inside = [thing for thing in self.world.visible(self.state) if self.world.places[thing] == "chest"]
        return f"You open the chest. In it: {_listed(inside)}."

    def _unlock(self) -> str:
        if not any(self.world.locked(self.state, direction) for direction in self.world.exits[self.state.room]):
            return "There is no locked door here."
        if self.world.key not in self.state.held:
            return "You have no key that fits."
        self.state = replace(self.state, unlocked=True)
        return f"You unlock the door with the {self.world.key}."

    def _scene(self, *, known: bool = False) -> str:
        """The room; of one that was seen before only what matters for going on."""
        exits = [
            f"{direction} (locked door)" if self.world.locked(self.state, direction) else direction
            for direction in self.world.exits[self.state.room]
        ]
        parts = [f"{self.state.room.capitalize()}. Exits: {_listed(exits)}."]
        visible = self.world.visible(self.state)
        if self.world.chest == self.state.room and not (known and self.state.opened):
            parts.append("There is an open chest." if self.state.opened else "There is a closed chest.")
        if visible or not known:
            parts.append(f"You see: {_listed(visible)}.")
        return " ".join(parts)


def command_of(text: str) -> str:
    """The command in a turn: its last line, in lower case, without quotes, articles and polite marks."""
    lines = [line for line in text.lower().splitlines() if line.strip(_MARKS)]
    line = lines[-1].rpartition("command:")[2].rpartition("action:")[2] if lines else ""
    words = " ".join(line.strip(_MARKS).split())
    for article in _ARTICLES:
        words = words.replace(f" {article}", " ")
    return words[:80]


def _listed(names: Any) -> str:
    return ", ".join(names) or "nothing"
