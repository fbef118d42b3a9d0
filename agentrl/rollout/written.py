"""Written conversations as tokens: what a policy would have been sent and have sampled, had it said this.

Each turn of the assistant is what the template writes behind its generation prompt, up to and with the token that ends
the turn. What stands between two turns is the template's, too. Where it writes a turn otherwise once others follow (it
drops reasoning from the history, say), the next turn begins a new segment, as in an episode that is played.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from agentrl.errors import ConfigError, EnvError
from agentrl.rollout.ledger import TokenLedger
from agentrl.rollout.template.chat import ChatTemplate, opened_reasoning
from agentrl.rollout.template.encoding import any_of
from agentrl.rollout.template.rendering import plain
from agentrl.types import Generation, Message, Segment

_END_OF_REASONING = "</think>"


class Writer:
    """Makes segments of written conversations.

    Control tokens are tokens where the template writes them, and in the text of system, developer and assistant (calls
    that are written out, say); what ends a turn only where the template writes it. Elsewhere they are ordinary text.
    """

    def __init__(self, chat: ChatTemplate):
        self._chat = chat
        ends = {index: chat.decode(np.array([index], np.int32)) for index in chat.eos_token_ids}
        self._ends = re.compile(any_of(ends.values()))
        self._authors = {role: chat.every_control for role in ("system", "developer")}
        self._authors["assistant"] = chat.every_control - set(ends.values())

    def segments(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None = None) -> list[Segment]:
        """The conversation up to the last turn that is learned, mask 1 on what is: every turn of the assistant whose
        ``weight`` is not 0. Segments in which nothing is learned are left out.

        Log-probabilities and versions are 0 where the mask is 1: nobody sampled.

        Raises:
            ConfigError: there is no template, or it ends the assistant's turns with no token.
            EnvError: it refuses these messages, or writes a turn in another way than its generation prompt begins it.
        """
        renderer, encoder = self._chat.renderer, self._chat.encoder
        sealed_tools = encoder.seal_all(tools)
        sealed = [self._sealed(plain(message)) for message in messages]
        taken, _ = renderer.accepted(sealed, sealed_tools, generation=False)
        ledger, text = TokenLedger(), ""
        for number, message in enumerate(taken):
            if message["role"] != "assistant":
                continue
            prompt = renderer.render(taken[:number], sealed_tools)
            if text and prompt.startswith(text):
                ledger.append_env(encoder.encode_after_control(prompt[len(text) :]))
            elif text:
                ledger.new_segment(encoder.encode(prompt))
            else:
                ledger.start(encoder.encode(prompt))
            said = self._said(prompt, taken, number, sealed_tools)
            ids = encoder.encode_after_control(said)
            if message.get("weight") == 0:
                ledger.append_env(ids)
            else:
                nothing = np.zeros(len(ids), np.float32)
                ledger.append_sampled(Generation(ids, nothing, nothing.astype(np.int32), "stop"))
            text = prompt + said
        return ledger.segments()

    def _sealed(self, message: dict[str, Any]) -> dict[str, Any]:
        encoder = self._chat.encoder
        own = self._authors.get(message["role"], frozenset())
        return {**encoder.seal_all(message), "content": encoder.seal(message["content"], own)}

    def _said(self, prompt: str, messages: list[dict[str, Any]], number: int, tools: Any) -> str:
        """What the assistant says in this message after ``prompt``, with what ends its turn."""
        renderer = self._chat.renderer
        whole = renderer.render(messages[: number + 1], tools, generation=False)
        opening = opened_reasoning(prompt)
        begun = prompt.removesuffix(opening)
        if whole.startswith(prompt):
            rest = whole[len(prompt) :]
        elif opening and whole.startswith(begun) and not whole[len(begun) :].lstrip().startswith(opening.strip()):
            # The history of this template knows nothing of the reasoning that its generation prompt opens.
            rest = f"{_reasoning_of(messages[number])}\n{_END_OF_REASONING}\n\n{whole[len(begun) :].lstrip()}"
        else:
            wanted, found = prompt[-40:], whole[len(begun) :][:40]
            raise EnvError(
                f"the chat template of {self._chat.name} writes message {number + 1} in another way than its "
                f"generation prompt begins it ({wanted!r} against {found!r}): the turn cannot be learned as it would "
                "be sampled. Use another chat_template"
            )
        if (end := self._ends.search(rest)) is not None:
            return rest[: end.end()]
        follower = messages[number + 1]["role"] if number + 1 < len(messages) else "user"
        if (token := self._chat.next_turn(follower)) is None:
            raise ConfigError(
                f"the chat template of {self._chat.name} ends the assistant's turns with no token, so that nothing "
                "would teach the model to stop; declare one in its generation_config.json or use another template"
            )
        return rest + self._chat.decode(np.array([token], np.int32))


def _reasoning_of(message: dict[str, Any]) -> str:
    within = message["content"].rpartition(_END_OF_REASONING)[0].removeprefix("<think>")
    return str(message.get("reasoning_content") or within).strip()
