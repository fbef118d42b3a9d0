"""One rule for what a reward is, wherever it comes from."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import agentrl
from agentrl.errors import EnvError
from agentrl.rewards.number import reward_number


class Tensor:
    """A scalar as torch has it: `item()`, and a `repr` of its own."""

    def __init__(self, *values: float) -> None:
        self.values = values

    def item(self) -> float:
        if len(self.values) != 1:
            raise RuntimeError("a Tensor with 2 elements cannot be converted to Scalar")
        return self.values[0]


NUMBERS = [
    1, True, np.True_, 0.5, np.float32(0.5), np.int64(3), np.array(2.0), np.array([2.0]), Fraction(1, 2),
    Decimal("0.5"), Tensor(0.5),
]  # fmt: skip
NOT_NUMBERS = [
    float("nan"), float("inf"), np.array(np.nan), None, "1.0", b"1", np.array("1.0"), [1.0], {}, 1j,
    np.array([1.0, 2.0]), Tensor(1.0, 2.0), 10**400,
]  # fmt: skip


class Plain(agentrl.Env):
    def __init__(self, value: Any) -> None:
        self.value = value

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return "Go.", {}

    def step(self, action: str) -> Any:
        return "", self.value, True, False, {}


class Pair(agentrl.MultiAgentEnv):
    agents = ("one", "two")

    def __init__(self, value: Any) -> None:
        self.value = value

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return "Go.", {"prompts": {"one": "", "two": ""}}

    def step(self, action: str) -> Any:
        return "", 0.0, True, False, {"agent_rewards": {"one": self.value}}


class Judged(agentrl.ToolEnv):
    tasks = {"train": [("a", "b")], "test": [("c", "d")]}

    def __init__(self, value: Any, part: str = "reward") -> None:
        super().__init__()
        self.value = value
        setattr(self, part, lambda text, answer: self.value)


class Parts(Judged):
    def __init__(self, value: Any) -> None:
        super().__init__({"part": value})


class Turns(Judged):
    def __init__(self, value: Any) -> None:
        super().__init__(value, "turn_reward")


def paid(make: Any, value: Any) -> float:
    env = make(value)
    env.reset(seed=0)
    _, reward, _, _, info = env.step("x")
    return info.get("agent_rewards", {}).get("one", reward)


@pytest.mark.parametrize("value", NUMBERS, ids=lambda value: repr(value).split(" object at")[0])
def test_numbers_of_all_kinds_are_rewards(value):
    expected = float(value.item() if hasattr(value, "item") else value)
    assert [paid(make, value) for make in (Plain, Pair, Judged, Parts, Turns)] == [expected] * 5


@pytest.mark.parametrize("make", [Plain, Pair, Judged, Turns])
@pytest.mark.parametrize("value", NOT_NUMBERS, ids=lambda value: repr(value)[:20])
def test_what_is_no_number_is_refused_in_one_sentence(make, value):
    if isinstance(value, dict) and make in (Judged, Turns):
        pytest.skip("named parts")
    with pytest.raises(EnvError, match=r"is .* \(\w+\); a finite number is expected\.$") as error:
        paid(make, value)
    assert "\n" not in str(error.value) and len(str(error.value)) < 220


def test_a_scalar_of_torch():
    torch = pytest.importorskip("torch")
    assert reward_number(torch.tensor(0.5, requires_grad=True), "it") == 0.5
    with pytest.raises(EnvError, match="it is tensor"):
        reward_number(torch.tensor([0.5, 1.0]), "it")
