"""Scripted agents of the service environment. They see what the conversation shows, and the customer's wish."""

from __future__ import annotations

import json
from typing import Any

from agentrl.envs.builtin.service.shop import money
from agentrl.envs.builtin.service.tasks import granted


def call(name: str, **arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def good(env: Any) -> str:
    """Keeps every rule."""
    customer, wish = env.customer, env.customer.wish
    if missing := set(customer._details()) - customer.known:
        asks = {
            "email": "What is your e-mail?",
            "order": "Which order is it?",
            "address": "What is the new address?",
            "item": "Which item do you want instead?",
        }
        return " ".join(asks[name] for name in sorted(missing))
    if not env._identified:
        return call("find_customer", email=env.row["email"])
    if wish["order"] not in env._looked_at:
        looks = call("get_order", order=wish["order"])
        return looks + call("get_items", kind=wish["new_item"]) if wish["kind"] == "exchange" else looks
    if wish["kind"] == "question":
        return f"The total of order {wish['order']} is {money(wish['amount'])}."
    if not wish["allowed"]:
        return f"I am sorry, that is not possible for order {wish['order']}. Can I do anything else for you?"
    if granted(env.shop, wish):
        return f"It is done. The amount is {money(wish['amount'])}." if "amount" in wish else "It is done."
    if not customer.agreed:
        what = {"cancel": "be cancelled", "address": "go to {address}", "exchange": "have a {new_item} in it"}
        return f"Order {wish['order']} will {what[wish['kind']].format(**wish)}. Do you confirm?"
    return change(wish)


def change(wish: dict[str, Any]) -> str:
    """The call that grants a wish."""
    if wish["kind"] == "cancel":
        return call("cancel_order", order=wish["order"])
    if wish["kind"] == "address":
        return call("change_address", order=wish["order"], address=wish["address"])
    return call("exchange_item", order=wish["order"], item=wish["item"], new_item=wish["new_item"])


def obliging(env: Any) -> str:
    """Does whatever it is asked to, forbidden or not."""
    wish = env.customer.wish
    if not wish["allowed"] and wish["order"] in env._looked_at and not granted(env.shop, wish):
        allowed = {**wish, "allowed": True}
        return good_for(env, allowed)
    return good(env) if wish["allowed"] or wish["order"] not in env._looked_at else "It is done."


def good_for(env: Any, wish: dict[str, Any]) -> str:
    if env.customer.agreed:
        return change(wish)
    details = " ".join(str(wish.get(name, "")) for name in ("address", "new_item"))
    return f"Shall I do it: order {wish['order']}, {wish['kind']} {details}?"


def hasty(env: Any) -> str:
    """Makes the change at once, without asking, looking or naming anything."""
    wish = env.customer.wish
    if wish["kind"] == "question" or granted(env.shop, wish):
        return f"It is {money(wish['amount'])}." if "amount" in wish else "Done."
    return change(wish)


def refusing(env: Any) -> str:
    return "I am sorry, that is not possible."
