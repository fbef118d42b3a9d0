"""Leave-one-out baselines."""

from __future__ import annotations

import numpy as np

from agentrl.algorithms.group import GroupAlgorithm, centred


class RLOO(GroupAlgorithm):
    """Reward less the mean of the others of its group (Ahmadian et al., arXiv:2402.14740, equation 9).

    ``r_i - 1/(n-1) Σ_{j≠i} r_j``, which is ``n/(n-1) (r_i - mean(r))``: unbiased, as no reward is in its own baseline.
    """

    name = "rloo"

    def compare(self, returns: np.ndarray) -> np.ndarray:
        return centred(returns) * (len(returns) / (len(returns) - 1))
