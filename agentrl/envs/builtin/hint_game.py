"""``HintGameEnv``: one agent hints at an object, the other finds it; they play together or against each other."""

from __future__ import annotations

import re
import zlib
from typing import Any

import numpy as np

from agentrl.envs.core import task_index
from agentrl.envs.multi_agent import MultiAgentEnv
from agentrl.loading import toml_beside
from agentrl.tools.formats import get_parser
from agentrl.values import check_choice, check_number

_DATA = toml_beside(__file__, "hint_game.toml")
ATTRIBUTES, PROMPTS, INTERESTS = _DATA["attributes"], _DATA["prompts"], _DATA["interests"]
_KIND = {word: kind for kind, words in ATTRIBUTES.items() for word in words}
_TRIES = 2

Thing = tuple[str, str, str]
"""Size, color, shape."""


class HintGameEnv(MultiAgentEnv):
    """A reference game of two agents over objects such as *small red ball*.

    The ``hinter`` sees the objects and which one is meant, and says one true word about it. The ``guesser`` sees the
    word and the objects, numbered in another order, and names one. Only the word is passed on, so nothing else can
    be agreed upon. A wrong guess leads to the next round, if there is one, with another word.

    With ``shared`` rewards both earn 1/round for the right guess, 0 otherwise: the best word is one that no
    other object shares. With ``opposed`` ones the guesser earns 1/round, or -1 if it never finds the object, and
    the hinter the negative of it: its best word is one that most objects share.

    Args:
        rewards: ``shared`` or ``opposed``.
        objects: how many there are, 2 to 8.
        rounds: hints and guesses until the object counts as not found.

    Raises:
        ConfigError: an argument is out of range.

    Example:
        >>> env = HintGameEnv()
        >>> env.reset(options={"split": "test", "index": 0})[1]["agent"]
        'hinter'
        >>> env.step("blue")[4]["agent"]
        'guesser'
    """

    agents = ("hinter", "guesser")
    task_counts = {"train": 10_000, "test": 500}
    call_format = "none"

    def __init__(self, *, rewards: str = "shared", objects: int = 4, rounds: int = 1) -> None:
        check_choice("rewards", rewards, INTERESTS)
        check_number("objects", objects, 2, 8)
        check_number("rounds", rounds, 1, 3)
        self.rewards, self.objects, self.rounds = rewards, objects, rounds
        # As many as can be taken: whoever is about to lose must not get away by wasting them.
        self.max_turns = len(self.agents) * _TRIES * rounds

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        split = self.split_of(options)
        index = task_index(self, split, options)
        self.things, self.target = make_task(split, index, self.objects)
        self.round, self._tries = 1, _TRIES
        self.said: list[str] = []
        known, sought = INTERESTS[self.rewards]
        numbered = "\n".join(f"{number}. {' '.join(thing)}" for number, thing in enumerate(self.things, 1))
        self._numbered = f"Objects:\n{numbered}\nHint: "
        listed = ", ".join(" ".join(thing) for thing in sorted(self.things))
        info = {
            "prompts": {
                "hinter": PROMPTS["hinter"].format(kinds=", ".join(ATTRIBUTES), interest=known),
                "guesser": PROMPTS["guesser"].format(interest=sought),
            },
            "task_id": f"{split}/{index}",
            "category": next(_KIND[word] for word in self.target if self._shared_by(word) == 1),
        }
        return f"Objects: {listed}.\nMeant: {' '.join(self.target)}.", info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        text = get_parser("none").parse(action).content.lower()
        return self._hint(text) if self.acting == "hinter" else self._guess(text)

    def forfeit(self, agent: str) -> dict[str, float]:
        """Who does not come to an end loses; together, nobody wins."""
        return self._paid(found=False, against=agent)

    # -- the two roles ---------------------------------------------------------------------------

    def _hint(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        words = [word for word in re.findall(r"[a-z]+", text) if word in _KIND]
        fault = None
        if len(set(words)) != 1:
            fault = f"Say exactly one of these words: {', '.join(self.target)}."
        elif words[0] not in self.target:
            fault = f"It is not {words[0]}. Say one of: {', '.join(self.target)}."
        elif words[0] in self.said:
            fault = f"You said {words[0]} already. Say another word that is true of it."
        if fault is not None:
            return self._again("hinter", fault)
        self.said.append(words[0])
        self._tries = _TRIES
        shown = self._numbered if self.round == 1 else "Next hint: "
        return f"{shown}{words[0]}", 0.0, False, False, {"agent": "guesser", "agent_rewards": {}}

    def _guess(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        numbers = re.findall(r"\d+", text)
        number = int(numbers[-1][:4]) if numbers else 0
        if not 1 <= number <= len(self.things):
            return self._again("guesser", f"Reply with a number from 1 to {len(self.things)}.")
        self._tries = _TRIES
        if self.things[number - 1] == self.target:
            return self._over(found=True)
        self.round += 1
        if self.round > min(self.rounds, len(self.target)):
            return self._over(found=False)
        wrong = f"The other player guessed {' '.join(self.things[number - 1])}. Say another word."
        return wrong, 0.0, False, False, {"agent": "hinter", "agent_rewards": {}}

    def _again(self, agent: str, fault: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._tries -= 1
        if self._tries <= 0:
            return self._over(found=False, against=agent)
        return fault, 0.0, False, False, {"agent": agent, "agent_rewards": {}}

    def _over(self, *, found: bool, against: str = "guesser") -> tuple[str, float, bool, bool, dict[str, Any]]:
        paid = self._paid(found=found, against=against)
        return "", paid["guesser"], True, False, {"success": found, "agent_rewards": paid}

    def _paid(self, *, found: bool, against: str) -> dict[str, float]:
        """Rewards of the end; ``against`` is who loses a game with opposed rewards that finds nothing."""
        value = 1.0 / self.round if found else 0.0
        if self.rewards == "shared":
            return {"hinter": value, "guesser": value}
        won = value if found else (1.0 if against == "hinter" else -1.0)
        return {"hinter": -won, "guesser": won}

    def _shared_by(self, word: str) -> int:
        return sum(word in thing for thing in self.things)

    def oracle(self) -> str:
        """What a perfect player in the place of the acting agent says; for tests."""
        if self.acting == "guesser":
            fitting = [i for i, thing in enumerate(self.things, 1) if set(self.said) <= set(thing)]
            return str(fitting[0])
        words = sorted((w for w in self.target if w not in self.said), key=self._shared_by)
        return words[0 if self.rewards == "shared" else -1]


def held_out(thing: Thing) -> bool:
    """Whether tasks about this object belong to the test split: those of a quarter of all objects."""
    return zlib.crc32(" ".join(thing).encode()) % 4 == 0


def make_task(split: str, index: int, objects: int) -> tuple[list[Thing], Thing]:
    """Objects in the guesser's order and the one that is meant.

    One of its words is true of no other object, so that one hint can be enough, and one is true of another.
    """
    rng = np.random.default_rng([zlib.crc32(split.encode()), index])
    while True:
        target = _draw(rng)
        if held_out(target) != (split == "test"):
            continue
        things = {target}
        while len(things) < objects:
            thing = list(_draw(rng))
            if rng.random() < 0.7:  # share something with what is meant, or every word would do
                place = int(rng.integers(len(target)))
                thing[place] = target[place]
            things.add((thing[0], thing[1], thing[2]))
        sharing = [sum(word in thing for thing in things) for word in target]
        if min(sharing) == 1 and max(sharing) > 1:
            order = sorted(things)
            return [order[i] for i in rng.permutation(len(order))], target


def _draw(rng: np.random.Generator) -> Thing:
    size, color, shape = (words[int(rng.integers(len(words)))] for words in ATTRIBUTES.values())
    return size, color, shape
