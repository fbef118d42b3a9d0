"""What customers come with: a shop drawn for each task, wishes, and what the shop must look like in the end."""

from __future__ import annotations

from typing import Any

import numpy as np

from agentrl.envs.builtin.service.shop import DATA, KINDS, Shop, State, kind_of

WISHES = ("cancel", "exchange", "address", "question", "refuse")
"""Kinds of wishes, which are the categories of tasks; ``refuse`` is any of the first three where it is forbidden."""
ALLOWED_STATUS = {"cancel": "pending", "address": "pending", "exchange": "delivered"}

_COLORS, _FIRST, _STREETS, _CITIES = (DATA[name] for name in ("colors", "first_names", "streets", "cities"))

Wish = dict[str, Any]
"""``kind``, ``order``, ``allowed``; as it applies ``address``, ``item``, ``new_item``, the ``amount`` to be told."""


def make_task(rng: np.random.Generator, split: str, *, wishes: int) -> dict[str, Any]:
    """A row: ``shop``, ``email``, ``wishes`` and the ``goal`` state. No customer of ``test`` is one of ``train``."""
    shop = _make_shop(rng, split)
    kinds = [WISHES[i] for i in rng.permutation(len(WISHES))[:wishes]]
    emails = list(shop["customers"])
    email = emails[0]
    free = [number for number, order in shop["orders"].items() if order["customer"] == email]
    made = [_make_wish(rng, shop, kind, free.pop()) for kind in kinds]
    goal = Shop(shop)
    for wish in made:
        if wish["allowed"]:
            apply(goal, wish)
    return {"shop": shop, "email": email, "wishes": made, "goal": goal.state, "category": "+".join(kinds)}


def apply(shop: Shop, wish: Wish) -> None:
    """Do what is wished for."""
    if wish["kind"] == "cancel":
        shop.cancel(wish["order"])
    elif wish["kind"] == "address":
        shop.change_address(wish["order"], wish["address"])
    elif wish["kind"] == "exchange":
        shop.exchange(wish["order"], wish["item"], wish["new_item"])


def granted(shop: Shop, wish: Wish) -> bool:
    """Whether the shop is as the wish would have it."""
    order = shop.state["orders"][wish["order"]]
    if wish["kind"] == "cancel":
        return order["status"] == "cancelled"
    if wish["kind"] == "address":
        return order["address"] == wish["address"]
    if wish["kind"] == "exchange":
        return wish["new_item"] in order["items"] and wish["item"] not in order["items"]
    return False


def _make_shop(rng: np.random.Generator, split: str) -> State:
    catalog: dict[str, Any] = {}
    for kind in KINDS:
        colors = [_COLORS[i] for i in rng.permutation(len(_COLORS))[:3]]
        prices = 0.5 * rng.choice(np.arange(20, 200), size=3, replace=False)  # no two of a kind cost the same
        for color, price in zip(colors, prices, strict=True):
            catalog[f"{color} {kind}"] = {"price": float(price), "stock": 5}
        catalog[f"{colors[2]} {kind}"]["stock"] = 0
    last = DATA["last_names"][split]
    names = [_FIRST[i] for i in rng.permutation(len(_FIRST))[:3]]
    customers = {}
    for first in names:
        family = last[int(rng.integers(len(last)))]
        customers[f"{first}.{family}@mail.com"] = f"{first} {family}".title()
    numbers = rng.choice(np.arange(1000, 10_000), size=8, replace=False)
    orders: dict[str, Any] = {}
    for place, number in enumerate(numbers):
        email = list(customers)[0 if place < 4 else 1 + place % 2]
        kinds = [KINDS[i] for i in rng.permutation(len(KINDS))[: int(rng.integers(1, 3))]]
        items = [_of_kind(rng, catalog, kind) for kind in kinds]
        status = ("pending", "shipped", "delivered")[int(rng.integers(3))]
        orders[str(number)] = {"customer": email, "status": status, "address": _address(rng), "items": items}
    return {"customers": customers, "orders": orders, "catalog": catalog}


def _make_wish(rng: np.random.Generator, shop: State, kind: str, number: str) -> Wish:
    allowed = kind != "refuse"
    order = shop["orders"][number]
    if kind == "refuse":
        kind = tuple(ALLOWED_STATUS)[int(rng.integers(3))]
        order["status"] = "shipped"
    wish: Wish = {"kind": kind, "order": number, "allowed": allowed}
    if kind == "question":
        wish["amount"] = Shop(shop).total(order)
        return wish
    if allowed:
        order["status"] = ALLOWED_STATUS[kind]
    if kind == "cancel":
        wish["amount"] = Shop(shop).total(order)
    elif kind == "address":
        while (address := _address(rng)) == order["address"]:
            pass
        wish["address"] = address
    else:
        item, prices = order["items"][0], shop["catalog"]
        others = [name for name in prices if kind_of(name) == kind_of(item) and name != item]
        sold_out = [name for name in others if not prices[name]["stock"]]
        new = next(name for name in others if prices[name]["stock"])
        if not allowed and rng.random() < 0.5 and sold_out:  # forbidden for another reason than the order's status
            order["status"], new = "delivered", sold_out[0]
        wish |= {"item": item, "new_item": new, "amount": abs(prices[new]["price"] - prices[item]["price"])}
    return wish


def _of_kind(rng: np.random.Generator, catalog: dict[str, Any], kind: str) -> str:
    names = [name for name in catalog if kind_of(name) == kind]
    return names[int(rng.integers(len(names)))]


def _address(rng: np.random.Generator) -> str:
    street, city = _STREETS[int(rng.integers(len(_STREETS)))], _CITIES[int(rng.integers(len(_CITIES)))]
    return f"{int(rng.integers(1, 90))} {street} Road, {city}"
