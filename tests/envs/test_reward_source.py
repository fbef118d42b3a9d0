"""Whether a ``ToolEnv`` has a reward at all, and what counts as a method."""

from __future__ import annotations

import pytest

import agentrl
from agentrl import ToolEnv, ToolResult, tool
from agentrl.errors import ConfigError


@tool
def plain(text: str) -> str | None:
    """Says nothing.

    Args:
        text: Anything.
    """


@tool
def rewarding(text: str) -> str | ToolResult:
    """May reward.

    Args:
        text: Anything.
    """
    return ToolResult(text, reward=1.0)


class Rows(ToolEnv):
    tasks = {"train": ["Go."], "test": ["Go."]}


@pytest.mark.parametrize("attributes", [{}, {"tools": [plain]}, {"reward": []}, {"tools": [plain], "reward": None}])
def test_an_environment_that_can_reward_nothing_is_refused_when_it_is_made(attributes):
    cls = type("Idle", (Rows,), attributes)
    with pytest.raises(ConfigError, match="Idle has no reward.*def reward.*ToolResult"):
        cls()
    with pytest.raises(ConfigError, match="Idle has no reward"):
        agentrl.make(cls, max_turns=2)


def test_a_reward_may_come_from_elsewhere():
    class Later(Rows):
        def __init__(self, **settings):
            super().__init__(**settings)
            self.reward = "exact_match"

    class Itself(Rows):
        async def astep(self, action):
            return "", 1.0, True, False, {}

    def untyped(text: str):
        """Says something.

        Args:
            text: Anything.
        """

    for cls in (Later, Itself, type("T", (Rows,), {"tools": [rewarding]}), type("U", (Rows,), {"tools": [untyped]})):
        assert cls(max_turns=3).reset(seed=0)[0] == "Go."
    assert Rows(invalid_call_reward=-0.1).max_turns == 8


class Judge:
    @staticmethod
    def static(text, answer):
        return 2.0


def test_a_method_is_one_whatever_its_first_parameter_is_called():
    class Method(Rows):
        worth = 0.5

        def reward(this, text, answer):
            return this.worth

    class Inherited(Method):
        worth = 0.25

    class ByClass(Rows):
        @classmethod
        def reward(cls, text, answer):
            return 3.0

    class ByStatic(Rows):
        @staticmethod
        def reward(text, answer):
            return 4.0

    class Borrowed(Rows):
        reward = Judge.static

    class WithoutSelf(Rows):
        def reward(text, answer):
            return len(text)

    for cls, worth in ((Method, 0.5), (Inherited, 0.25), (ByClass, 3.0), (ByStatic, 4.0), (Borrowed, 2.0),
                       (WithoutSelf, 2.0)):  # fmt: skip
        env = cls()
        env.reset(seed=0)
        assert env.step("ok")[1] == worth
