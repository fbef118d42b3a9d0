"""Ask for the total price of a shopping list; the prices are known to a tool only."""

import agentrl

PRICES = dict(apple=3, bread=4, cheese=9, dates=7, eggs=5, flour=2, grapes=8, honey=6, jam=4, kale=1, lemon=2)
GOODS = {"train": list(PRICES)[:6], "test": list(PRICES)[6:]}  # a test never asks for what was trained on


@agentrl.tool
def price(item: str) -> str:
    """Looks up the price of one item.

    Args:
        item: Name of the item.
    """
    return str(PRICES[item]) if item in PRICES else f"We do not sell {item}."


class Shopping(agentrl.ToolEnv):
    system_prompt = "Look up the price of each item, then answer with the total as a number."
    tools = [price]

    def task(self, rng, split):
        items = rng.choice(GOODS[split], size=3, replace=False)
        return f"What do {', '.join(items)} cost together?", sum(PRICES[item] for item in items)

    def reward(self, text, answer):
        return float(text.strip() == str(answer))
