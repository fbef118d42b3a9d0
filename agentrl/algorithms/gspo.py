"""Group sequence policy optimization."""

from agentrl.algorithms.grpo import GRPO


class GSPO(GRPO):
    """GRPO's credit; ratio and clip are of the trajectory (GSPO, arXiv:2507.18071, equations 5 to 7).

    ``s_i = exp(1/|y_i| Σ_t log(π(y_t) / π_old(y_t)))``, and each trajectory counts alike. Such ratios are near 1: the
    paper clips at 3e-4 below and 4e-4 above.
    """

    name = "gspo"
    sequence_ratio = True
    aggregation = "seq-mean-token-mean"
