"""A policy that says what a script says: for tests and offline examples, under the engine client's contract."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import numpy as np

from agentrl.errors import EngineError
from agentrl.rollout.template.chat import ChatTemplate
from agentrl.types import Generation, SamplingParams

Script = Sequence[str] | Callable[[str, int], str]


class ScriptedClient:
    """Answers turn i of each routing key with ``script[i]`` (the last one again when it runs out).

    Args:
        script: texts without end-of-turn token, or ``(prompt text, turn) -> text``.
        chat: gives the ids.
        version: weight version stamped on each token.
        latency: seconds before an answer.
        end_turn: whether the model ends its turn with the end-of-turn token; without it, as when a
            stop string matched.

    Example:
        >>> client = ScriptedClient(["<answer>4</answer>"], chat)  # doctest: +SKIP
    """

    def __init__(
        self,
        script: Script,
        chat: ChatTemplate,
        *,
        version: int = 0,
        latency: float = 0.0,
        end_turn: bool = True,
    ) -> None:
        self.version = version
        self.requests: list[np.ndarray] = []
        self._script, self._chat = script, chat
        self._latency, self._end_turn = latency, end_turn
        self._turns: dict[str, int] = {}

    async def generate(
        self, input_ids: np.ndarray, params: SamplingParams, *, rid: str, routing_key: str, timeout: float
    ) -> Generation:
        """See :class:`~agentrl.rollout.policies.sglang.PolicyClient`."""
        if self._latency >= timeout:
            await asyncio.sleep(timeout)
            raise EngineError(f"the scripted policy gave no answer within {timeout:.0f} s")
        await asyncio.sleep(self._latency)
        prompt = np.array(input_ids, np.int32)
        self.requests.append(prompt)
        turn = self._turns.get(routing_key, 0)
        self._turns[routing_key] = turn + 1
        if callable(self._script):
            text = self._script(self._chat.decode(prompt), turn)
        else:
            text = self._script[min(turn, len(self._script) - 1)]
        ids, reason = self._sampled(text, params)
        return Generation(
            tokens=ids,
            # Any finite values will do; they differ so that misplaced ones are found.
            logprobs=-0.01 * (1 + np.arange(len(ids), dtype=np.float32) % 100),
            versions=np.full(len(ids), self.version, np.int32),
            finish_reason=reason,
            cached_tokens=0,
            prompt_tokens=len(prompt),
            seconds=self._latency,
        )

    async def close(self) -> None:
        """Nothing to close."""

    def _sampled(self, text: str, params: SamplingParams) -> tuple[np.ndarray, str]:
        """Ids as a model would sample them: calls as control tokens, cut at the first stop or the budget."""
        ends = [at + len(stop) for stop in params.stop if (at := text.find(stop)) >= 0]
        stopped = bool(ends)
        if stopped:
            text = text[: min(ends)]
        ids = self._chat.encoder.encode_after_control(text)
        if self._end_turn and not stopped and self._chat.end_of_turn_id is not None:
            ids = np.append(ids, np.int32(self._chat.end_of_turn_id))
        at_stop = np.flatnonzero(np.isin(ids, params.stop_token_ids))
        if len(at_stop):
            ids, stopped = ids[: at_stop[0] + 1], True
        if len(ids) > params.max_new_tokens:
            return ids[: params.max_new_tokens], "length"
        return ids, "stop"
