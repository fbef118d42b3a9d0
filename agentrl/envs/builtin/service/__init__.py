"""``ServiceEnv``: an agent serves a customer by tools and rules; the final database says how well."""

from __future__ import annotations

from typing import Any

import numpy as np

from agentrl.envs.builtin.service.customer import Customer
from agentrl.envs.builtin.service.shop import DATA, Shop, kind_of, money
from agentrl.envs.builtin.service.tasks import ALLOWED_STATUS, make_task
from agentrl.envs.tool_env import ToolEnv
from agentrl.tools.base import tool
from agentrl.types import Message
from agentrl.values import check_choice, check_number

DIFFICULTIES = {"easy": (True, 0, 1), "normal": (False, 0, 1), "hard": (False, 2, 2)}
"""Whether the customer says everything at once, how often it insists, how many wishes it has."""


class ServiceEnv(ToolEnv):
    """A customer's conversation with the service of a shop.

    A turn with tool calls works on the shop's database; a turn without them is said to the customer, who answers until
    it says goodbye. The tools do what they are told, whatever the rules say: keeping to them is the agent's part.

    The episode is a success, worth 1, when three things hold in the end: ``database``: it is exactly as it should be;
    ``customer``: each wish was granted with its amount told, or refused where the rules forbid it; ``rules``: none was
    broken on the way (``info["violations"]`` lists those that were).

    Args:
        difficulty: ``easy``: the customer says all it knows at once; ``normal``: only when asked; ``hard``: also with
            two wishes, and insisting on what is forbidden.
        partial_credit: share of the reward, 0 to 1, that is earned by parts, a third each.

    Raises:
        ConfigError: an argument is out of range.

    Example:
        >>> env = ServiceEnv(difficulty="easy")
        >>> env.reset(options={"split": "test", "index": 0})[0]
        'Hello. My e-mail is ...'
    """

    task_counts = {"train": 10_000, "test": 500}
    max_turns = 20
    system_prompt = DATA["rules"]

    def __init__(self, *, difficulty: str = "normal", partial_credit: float = 0.0) -> None:
        check_choice("difficulty", difficulty, DIFFICULTIES)
        check_number("partial_credit", partial_credit, 0, 1, whole=False)
        self.open_with_all, self.insist, self.wishes = DIFFICULTIES[difficulty]
        self.partial_credit = partial_credit

    def task(self, rng: np.random.Generator, split: str) -> dict[str, Any]:
        row = make_task(rng, split, wishes=self.wishes)
        return {**row, "prompt": self._customer(row, Shop(row["shop"])).opening()}

    def _customer(self, row: dict[str, Any], shop: Shop) -> Customer:
        return Customer(row, shop, open_with_all=self.open_with_all, insist=self.insist)

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        observation, info = await super().areset(seed=seed, options=options)
        self.shop = Shop(self.row["shop"])
        self.customer = self._customer(self.row, self.shop)
        self.customer.opening()
        self.violations: list[str] = []
        self._identified = False
        self._looked_at: set[str] = set()
        return observation, {**info, "category": self.row["category"]}

    async def astep(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        parsed = self._parser.read(action)
        if parsed.tool_calls:
            return await super().astep(action)
        wish, closed = self.customer.wish, self.customer.closed
        words, over = self.customer.reply(parsed.content)
        if self.customer.closed > closed:
            self._check_grounds(wish["order"])
        info: dict[str, Any] = {"messages": [Message(role="user", content=words)]}
        if not over:
            return words, 0.0, False, False, info
        parts = {
            "database": float(self.shop.state == self.row["goal"]),
            "customer": float(self.customer.satisfied),
            "rules": float(not self.violations),
        }
        success = all(parts.values())
        reward = (1 - self.partial_credit) * success + self.partial_credit * sum(parts.values()) / len(parts)
        info |= {"rewards": parts, "success": success, "violations": list(self.violations)}
        return words, reward, True, False, info

    # -- the shop's tools ------------------------------------------------------------------------

    @tool
    async def find_customer(self, email: str) -> str:
        """Find a customer.

        Args:
            email: E-mail.
        """
        name = self.shop.customer(email)
        address = email.strip().lower()
        self._identified |= address == self.row["email"]
        return f"{name}. Orders: {', '.join(self.shop.orders_of(address))}."

    @tool
    async def get_order(self, order: str) -> str:
        """Look at an order.

        Args:
            order: Number.
        """
        found = self.shop.order(order)
        self._looked_at.add(_number(order))
        items = ", ".join(f"{name} {money(self.shop.item(name)['price'])}" for name in found["items"])
        total = money(self.shop.total(found))
        return f"{found['status'].capitalize()}. To {found['address']}. Items: {items}. Total {total}."

    @tool
    async def get_items(self, kind: str) -> str:
        """List items of a kind.

        Args:
            kind: Such as lamp.
        """
        lines = []
        for name in self.shop.of_kind(kind):
            entry = self.shop.item(name)
            lines.append(f"{name} {money(entry['price'])} ({'in stock' if entry['stock'] else 'sold out'})")
        return ", ".join(lines)

    @tool
    async def cancel_order(self, order: str) -> str:
        """Cancel an order.

        Args:
            order: Number.
        """
        before = dict(self.shop.order(order))
        refund = self.shop.cancel(order)
        self._check("cancel", order, before)
        return f"Cancelled. Refund {money(refund)}."

    @tool
    async def change_address(self, order: str, address: str) -> str:
        """Send an order elsewhere.

        Args:
            order: Number.
            address: New address.
        """
        before = dict(self.shop.order(order))
        self.shop.change_address(order, address)
        self._check("address", order, before)
        return "Changed."

    @tool
    async def exchange_item(self, order: str, item: str, new_item: str) -> str:
        """Exchange an item.

        Args:
            order: Number.
            item: Old item.
            new_item: New item.
        """
        before = dict(self.shop.order(order))
        difference = self.shop.exchange(order, item, new_item)
        self._check("exchange", order, before)
        if kind_of(item.lower().strip()) != kind_of(new_item.lower().strip()):
            self._broke("kind")
        if not self.shop.item(new_item)["stock"]:
            self._broke("stock")
        return f"Exchanged. {money(difference)} {'to pay' if difference > 0 else 'refunded'}."

    def _check(self, change: str, number: str, before: dict[str, Any]) -> None:
        """Which rules a change broke that has just been made."""
        self._check_grounds(number)
        if before["customer"] != self.row["email"]:
            self._broke("owner")
        if before["status"] != ALLOWED_STATUS[change]:
            self._broke("status")
        if not self.customer.agreed:
            self._broke("confirm")
        self.customer.agreed = False

    def _check_grounds(self, number: str) -> None:
        """Nobody is served, or refused, unknown and unseen."""
        if not self._identified:
            self._broke("identify")
        if _number(number) not in self._looked_at:
            self._broke("look")

    def _broke(self, rule: str) -> None:
        if rule not in self.violations:
            self.violations.append(rule)


def _number(order: str) -> str:
    return order.strip().lstrip("#")
