"""The customer: a scripted person with wishes, who answers questions, says yes or no, and ends the conversation."""

from __future__ import annotations

import re
from typing import Any

from agentrl.envs.builtin.service.shop import Shop
from agentrl.envs.builtin.service.tasks import Wish, granted
from agentrl.loading import toml_beside

PATIENCE = 4
"""Replies of no use to the customer after which it gives up."""
MOST_NUMBERS = 8
"""Different numbers in a reply that tells an amount: more of them are guesses, and one would be right by chance."""

_WORDS = toml_beside(__file__, "customer.toml")
_ASKED = {name: re.compile(words) for name, words in _WORDS["asked"].items()}
_ASKING, _CONFIRMING, _REFUSING, _POLITE, _SENTENCES = map(re.compile, _WORDS["heard"].values())


class Customer:
    """Speaks for a task's customer.

    It tells what it is asked for (everything at once with ``open_with_all``), agrees to a change that names the order
    and the change as it wants them, asks for the amount where it was not told, accepts a refusal after having objected
    ``insist`` times, and then comes with its next wish. In the ``shop`` it sees whether a wish was granted."""

    def __init__(self, row: dict[str, Any], shop: Shop, *, open_with_all: bool, insist: int) -> None:
        self._shop, self._email = shop, row["email"]
        self._wishes: list[Wish] = list(row["wishes"])
        self._open_with_all, self._insist = open_with_all, insist
        self._patience, self._objections = PATIENCE, insist
        self.known = {"email"} if open_with_all else set()
        """What it has told: ``email``, ``order``, ``address``, ``item``."""
        self.agreed = False
        """Whether it has said yes to the change it wants, and the change is still to be made."""
        self.satisfied = True
        """Whether each wish so far was granted and accounted for, or refused where it had to be."""
        self.closed = 0
        """Wishes it is done with."""
        self._at = 0

    @property
    def wish(self) -> Wish:
        """What it wants now."""
        return self._wishes[self._at]

    def opening(self) -> str:
        """The first words."""
        greeting = f"Hello. My e-mail is {self._email}. " if self._open_with_all else "Hello. "
        return greeting + self._state()

    def reply(self, said: str) -> tuple[str, bool]:
        """What it answers, and whether the conversation is over."""
        text = " ".join(said.lower().replace("#", "").split())
        sentences = [s for s in _SENTENCES.split(said.lower().strip()) if not _POLITE.search(s)]
        if self._settled(text):
            return self._next("Thank you.")
        if granted(self._shop, self.wish):
            return self._lost_patience("And what amount is it, exactly?")
        questions = [s for s in sentences if _ASKING.search(s)]
        asked = [name for name in self._details() if any(_ASKED[name].search(s) for s in questions)]
        if any(_CONFIRMING.search(s) for s in sentences) and not (asked and self.wish["order"] not in text):
            return self._consider(text)
        if asked:
            self.known.update(asked)
            return " ".join(_WORDS["tells"][name].format(email=self._email, **self.wish) for name in asked), False
        if _REFUSING.search(text):
            return self._refused()
        return self._lost_patience(f"I do not follow. {self._state()}")

    # -- what it says ----------------------------------------------------------------------------

    def _state(self) -> str:
        order = "one of my orders"
        detail = ""
        if self._open_with_all:
            self.known.update(self._details())
            order = f"order {self.wish['order']}"
            detail = _WORDS["detail"].get(self.wish["kind"], "").format(**self.wish)
        return _WORDS["wants"][self.wish["kind"]].format(order=order, detail=detail)

    def _details(self) -> tuple[str, ...]:
        """What there is to ask for, given the wish."""
        own = {"address": ("address",), "exchange": ("item",)}.get(self.wish["kind"], ())
        return ("email", "order", *own)

    # -- what it makes of the agent's words ------------------------------------------------------

    def _settled(self, text: str) -> bool:
        """Whether the wish is granted and its amount, if there is one, was told."""
        if self.wish["kind"] != "question" and not granted(self._shop, self.wish):
            return False
        amount, numbers = self.wish.get("amount"), set(re.findall(r"\d{1,9}(?:\.\d{1,2})?", text.replace(",", "")))
        if amount is None:
            return bool(text)
        return len(numbers) <= MOST_NUMBERS and any(abs(float(n) - amount) < 0.005 for n in numbers)

    def _consider(self, text: str) -> tuple[str, bool]:
        wanted = [self.wish["order"], *(self.wish[k].lower() for k in ("address", "new_item") if k in self.wish)]
        if self.wish["kind"] == "question":
            return self._lost_patience(f"There is nothing to confirm. {self._state()}")
        others = set(re.findall(r"\b\d{4}\b", text)) - {self.wish["order"]}
        if others & set(self._shop.state["orders"]):
            return self._lost_patience(f"No, that is not what I asked for. {self._state()}")
        if not all(words in text for words in wanted):
            return self._lost_patience("Please name the order and exactly what you would do.")
        self.agreed = True
        self.known.update(self._details()[1:])
        return "Yes, please do that.", False

    def _refused(self) -> tuple[str, bool]:
        if self.wish["allowed"]:
            self.satisfied = False
            return self._next("That is a pity.")
        if self._objections > 0:
            self._objections -= 1
            return "It is important to me. Can you not make an exception?", False
        return self._next("I see.")

    def _next(self, words: str) -> tuple[str, bool]:
        """On to the next wish, or goodbye."""
        self.agreed, self._objections, self._patience = False, self._insist, PATIENCE
        self.known &= {"email"}
        self.closed += 1
        if self._at + 1 == len(self._wishes):
            return f"{words} Goodbye.", True
        self._at += 1
        return f"{words} And another thing: {self._state()}", False

    def _lost_patience(self, words: str) -> tuple[str, bool]:
        self._patience -= 1
        if self._patience <= 0:
            self.satisfied = False
            return "I give up. Goodbye.", True
        return words, False
