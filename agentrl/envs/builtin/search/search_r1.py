"""Search-R1's recipe (Jin et al. 2025, arXiv 2503.09516) as an environment.

Prompt, tags, result format, action budget and reward are the paper's. Where its published code strays from
that, this does what the paper says: the reward reads only what the model wrote (there, the example answer in
the prompt could be graded), a closing tag is never cut off, results cannot forge tags, and
invalid turns are answered in a user turn of their own instead of by re-tokenized text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentrl.envs.builtin.search.env import QuestionEnv
from agentrl.loading import toml_beside
from agentrl.retrieval import Passage
from agentrl.rewards import exact_match
from agentrl.types import Message

PROMPT, INVALID_ACTION = toml_beside(__file__, "search_r1.toml").values()


def format_documents(passages: Sequence[Passage]) -> str:
    """``Doc 1(Title: "t") text``, one passage a line."""
    return "\n".join(
        f'Doc {number}(Title: "{passage.title}") {passage.text.strip()}'
        for number, passage in enumerate(passages, start=1)
    )


class SearchR1Env(QuestionEnv):
    """Question answering with ``<search>`` and ``<answer>`` tags, results in ``<information>`` tags.

    Takes the arguments of :class:`~agentrl.envs.builtin.search.env.QuestionEnv`; with none of them it asks about the
    synthetic world. Results continue the assistant's turn (message role ``inline``), as in the paper. The
    default of five turns is the paper's budget of four actions and one answer.

    Example:
        >>> env = SearchR1Env()
        >>> _, info = env.reset(options={"split": "test", "index": 0})
        >>> info["stop"]
        ['</search>', '</answer>']
        >>> env.step("<think> I know it. </think> <answer> Great Selminster </answer>")[1]
        1.0
    """

    show_passages = staticmethod(format_documents)
    call_format = "tags:search,answer"
    trusted_roles = ("user",)  # the recipe's prompt names <think>; the questions are the author's
    max_turns = 5
    max_tool_output = 2000
    """Characters of the results, about the recipe's 500 tokens."""

    def __init__(self, *, topk: int = 3, **sources: Any) -> None:
        super().__init__(topk=topk, **sources)

    def first_messages(self, row: dict[str, Any]) -> list[Message]:
        """One user message: the recipe's prompt around the question."""
        question = row["prompt"]
        if not question.endswith("?"):
            question += "?"
        return [Message(role="user", content=PROMPT.replace("{question}", question))]

    async def reward(self, text: str, answer: str | list[str]) -> dict[str, float]:
        """1.0 when the text of the answer tag matches exactly after SQuAD's normalization, else 0.0."""
        return {"exact_match": exact_match(text, answer)}

    async def astep(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = await super().astep(action)
        calls = info.get("tool_calls", [])
        if calls and all(call.get("error") for call in calls):
            info["messages"] = [Message(role="user", content=INVALID_ACTION)]
        elif calls:
            text = "\n".join(message["content"] for message in info["messages"])
            info["messages"] = [Message(role="inline", content=f"\n\n{text}\n\n")]
        else:
            return observation, reward, terminated, truncated, info
        return info["messages"][0]["content"], reward, terminated, truncated, info
