"""Algorithms: from rewards to the credit of each token. One small file each; numpy only.

``--advantage-estimator`` names one of :data:`ALGORITHMS`, or a class of your own as ``module:Class`` or
``file.py:Class``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentrl.algorithms.base import Algorithm, trainable, zero_variance_fraction
from agentrl.algorithms.batch import TrainBatch
from agentrl.algorithms.cispo import CISPO
from agentrl.algorithms.dr_grpo import DrGRPO
from agentrl.algorithms.grpo import GRPO
from agentrl.algorithms.gspo import GSPO
from agentrl.algorithms.ppo import PPO
from agentrl.algorithms.reinforce_plus_plus import ReinforcePlusPlus, ReinforcePlusPlusBaseline
from agentrl.algorithms.rloo import RLOO
from agentrl.algorithms.sft import SFT
from agentrl.errors import ConfigError, did_you_mean
from agentrl.loading import is_spec, load_object

if TYPE_CHECKING:
    from agentrl.config.schema import AlgorithmOptions

__all__ = ["ALGORITHMS", "Algorithm", "TrainBatch", "load_algorithm", "trainable", "zero_variance_fraction"]

ALGORITHMS: dict[str, type[Algorithm]] = {
    cls.name: cls for cls in (GRPO, DrGRPO, GSPO, CISPO, RLOO, PPO, ReinforcePlusPlus, ReinforcePlusPlusBaseline)
}


def load_algorithm(options: AlgorithmOptions) -> Algorithm:
    """The algorithm of ``--advantage-estimator``; with ``--loss-type sft_loss`` there is no such choice.
    Raises ConfigError: there is none of that name, or it is no :class:`Algorithm`."""
    if options.loss_type == "sft_loss":
        return SFT(options)
    given = options.advantage_estimator
    if not is_spec(given):
        if given in ALGORITHMS:
            return ALGORITHMS[given](options)
        raise ConfigError(
            f"--advantage-estimator {given!r}: expected one of {', '.join(ALGORITHMS)}, or a class of your own as "
            f"module:Class or file.py:Class.{did_you_mean(given, ALGORITHMS)}"
        )
    found = load_object(given, "--advantage-estimator")
    if not (isinstance(found, type) and issubclass(found, Algorithm)):
        raise ConfigError(f"--advantage-estimator {given!r}: expected a subclass of agentrl.algorithms.Algorithm.")
    return found(options)
