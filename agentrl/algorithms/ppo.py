"""Advantages against a learned value of each state."""

from __future__ import annotations

import numpy as np

from agentrl.algorithms import overlong
from agentrl.algorithms.base import Algorithm
from agentrl.algorithms.batch import TrainBatch


class PPO(Algorithm):
    """Generalized advantage estimation (arXiv:1506.02438, equations 11 to 16) under PPO's clipped loss
    (arXiv:1707.06347), with a critic.

    The state before a sampled token is all that the model has seen by then. So the value that follows the last token of
    a turn is that of the next turn's first token, which has seen the tool's output; tokens of the environment are no
    steps. A trajectory's segments are one after the other. After its last token the value is 0, also where a budget
    ended it.

    The reward of a turn comes with its last token (``rewards_of_turns``); ``--kl-coef`` takes ``log(old / ref)`` from
    the reward of each token, and ``--overlong-handling penalty`` is taken from that of the last one of all.

    With ``--credit-level turn`` a step is a turn: its value is that of its first token, its reward the sum over its
    tokens, and all of them share its advantage and its return. ``--gamma`` and ``--lambd`` then count turns.
    """

    name = "ppo"
    needs = ("values",)

    def credit(self, batch: TrainBatch) -> np.ndarray:
        return self._estimate(batch)[0]

    def returns(self, batch: TrainBatch) -> np.ndarray:
        """Advantage plus value: the lambda-return."""
        advantages, values = self._estimate(batch)
        return advantages + values

    def _estimate(self, batch: TrainBatch) -> tuple[np.ndarray, np.ndarray]:
        """float64[T], float64[T]: the advantage of each sampled token's step, and the value before that step."""
        at = np.flatnonzero(batch.loss_mask)
        step = batch.turn[at] if self.options.credit_level == "turn" else np.arange(len(at))
        first = np.flatnonzero(np.diff(step, prepend=-1))
        rewards = np.bincount(step, self.token_rewards(batch)[at], minlength=len(first))
        values = batch["values"][at[first]].astype(np.float64)
        whose = batch.trajectory[at[first]]
        advantages = gae(rewards, values, whose, gamma=self.options.gamma, lambd=self.options.lambd)
        of_tokens = np.zeros((2, batch.num_tokens))
        of_tokens[:, at] = advantages[step], values[step]
        return of_tokens[0], of_tokens[1]

    def token_rewards(self, batch: TrainBatch) -> np.ndarray:
        """float64[T]: the reward that comes with each sampled token."""
        rewards, at = np.zeros(batch.num_tokens), np.flatnonzero(batch.loss_mask)
        last = at[np.flatnonzero(np.diff(batch.turn[at], append=-1))]
        rewards[last] = batch.rewards_of_turns[batch.trajectory[last], batch.turn_in_trajectory[last]]
        final = at[np.flatnonzero(np.diff(batch.trajectory[at], append=-1))]
        rewards[final] -= overlong.penalty(batch, self.options)[batch.trajectory[final]]
        if self.options.kl_coef:
            rewards -= self.options.kl_coef * batch.loss_mask * self.kl_to_reference(batch)
        return rewards


def gae(
    rewards: np.ndarray, values: np.ndarray, trajectory: np.ndarray, *, gamma: float, lambd: float
) -> np.ndarray:
    """float64[N]: ``A_t = delta_t + gamma * lambd * A_(t+1)`` with ``delta_t = r_t + gamma * V_(t+1) - V_t``
    (arXiv:1506.02438, equation 16), from the end of each trajectory backwards.

    Args:
        rewards, values: float[N] of N steps, those of a trajectory next to each other and in time.
        trajectory: int[N], whose each is.
    """
    ends = np.flatnonzero(np.diff(trajectory, append=-1))
    lengths = np.diff(ends, prepend=-1)
    following = np.append(values, 0.0)[1:]
    following[ends] = 0.0
    advantages = rewards + gamma * following - values
    for back in range(1, lengths.max(initial=0)):  # all trajectories at once
        at = (ends - back)[lengths > back]
        advantages[at] += gamma * lambd * advantages[at + 1]
    return advantages
