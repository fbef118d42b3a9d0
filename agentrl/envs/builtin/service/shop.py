"""The shop's database. It does what it is told: whether the rules allow it is for the agent to know."""

from __future__ import annotations

import copy
from typing import Any

from agentrl.loading import toml_beside
from agentrl.tools.base import ToolError

State = dict[str, Any]
"""``customers``: e-mail -> name; ``orders``: number -> customer (e-mail), status, address, items; ``catalog``: item
-> price and stock. JSON values only, so that two states can be compared and stored."""


class Shop:
    """Customers, orders and items; methods raise ToolError where a name or number means nothing."""

    def __init__(self, state: State) -> None:
        self.state = copy.deepcopy(state)

    def order(self, number: str) -> dict[str, Any]:
        """The order of that number, with or without ``#``."""
        key = number.strip().lstrip("#")
        if key not in self.state["orders"]:
            raise ToolError(f"there is no order {number!r}; numbers look like 1043")
        return self.state["orders"][key]

    def item(self, name: str) -> dict[str, Any]:
        """Price and stock of an item such as ``red lamp``."""
        key = _item(name)
        if key not in self.state["catalog"]:
            raise ToolError(
                f"there is no item {name!r}; names look like 'red lamp', and get_items lists those of a kind"
            )
        return self.state["catalog"][key]

    def orders_of(self, email: str) -> list[str]:
        """Numbers of a customer's orders."""
        return [number for number, order in self.state["orders"].items() if order["customer"] == email]

    def customer(self, email: str) -> str:
        """The name of the customer with this e-mail."""
        key = email.strip().lower()
        if key not in self.state["customers"]:
            raise ToolError(f"no customer has the e-mail {email!r}")
        return self.state["customers"][key]

    def total(self, order: dict[str, Any]) -> float:
        """What the items of an order cost together."""
        return sum(self.state["catalog"][item]["price"] for item in order["items"])

    def of_kind(self, kind: str) -> list[str]:
        """Items of a kind such as ``lamp``."""
        wanted = _item(kind).split(" ")[-1]
        wanted = wanted[:-1] if wanted.endswith("s") and wanted not in KINDS else wanted
        found = [name for name in self.state["catalog"] if kind_of(name) == wanted]
        if not found:
            raise ToolError(f"there are no items of the kind {kind!r}; kinds are {', '.join(KINDS)}")
        return found

    def cancel(self, number: str) -> float:
        """Cancel an order; returns the refund."""
        order = self.order(number)
        if order["status"] == "cancelled":
            raise ToolError(f"order {number} is cancelled already")
        order["status"] = "cancelled"
        return self.total(order)

    def change_address(self, number: str, address: str) -> None:
        """Send an order elsewhere."""
        if not address.strip():
            raise ToolError("the address is empty")
        self.order(number)["address"] = " ".join(address.split())

    def exchange(self, number: str, item: str, new_item: str) -> float:
        """Exchange an item of an order; returns what the new one costs more (less than 0: is refunded)."""
        order, old, new = self.order(number), _item(item), _item(new_item)
        if old not in order["items"]:
            raise ToolError(f"order {number} has no {item!r}; it has {', '.join(order['items'])}")
        difference = self.item(new)["price"] - self.item(old)["price"]
        order["items"] = [new if name == old else name for name in order["items"]]
        return difference


DATA = toml_beside(__file__, "shop.toml")
KINDS = DATA["kinds"]


def kind_of(item: str) -> str:
    """``lamp`` of ``red lamp``."""
    return item.rpartition(" ")[2]


def money(amount: float) -> str:
    """``39.00``"""
    return f"{abs(amount):.2f}"


def _item(name: str) -> str:
    return " ".join(name.lower().split())
