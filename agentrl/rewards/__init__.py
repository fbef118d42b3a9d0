"""Reward functions: what is a turn's text worth, given the answer.

A reward function takes the model's final text and the task's answer, and by name, if it asks for
them, ``turns`` (all texts the model wrote), ``calls`` (the calls it made) and ``row`` (the task). It
sees only what the model produced, so no document can earn a reward. It returns a number, or a dict
of named parts. It may be ``async``.

It may also be a class, made once a process: a model of its own (:class:`BatchedReward`), or a language model behind an
OpenAI-compatible server (:class:`Judge`).
"""

from agentrl.rewards.batched import BatchedReward, RewardItem
from agentrl.rewards.choice import gpqa
from agentrl.rewards.combine import BUILT_IN, RewardFunction, RewardSet, compares, load, resolve
from agentrl.rewards.judge import Judge
from agentrl.rewards.mathematics import boxed, dapo, deepscaler, last_number, math_answer
from agentrl.rewards.remote import RemoteReward
from agentrl.rewards.text import exact_match, f1, normalize_answer

__all__ = [
    "BUILT_IN",
    "BatchedReward",
    "Judge",
    "RemoteReward",
    "RewardFunction",
    "RewardItem",
    "RewardSet",
    "boxed",
    "compares",
    "dapo",
    "deepscaler",
    "exact_match",
    "f1",
    "gpqa",
    "last_number",
    "load",
    "math_answer",
    "normalize_answer",
    "resolve",
]
