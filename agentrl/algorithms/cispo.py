"""Clipped importance-sampling weights."""

from agentrl.algorithms.grpo import GRPO


class CISPO(GRPO):
    """GRPO's credit on REINFORCE, weighted by a ratio that is clipped and has no gradient (MiniMax-M1,
    arXiv:2506.13585, equations 4 and 5): a token whose ratio is clipped still teaches.
    """

    name = "cispo"
    terms = ("clipped_weights", "kl", "entropy")
