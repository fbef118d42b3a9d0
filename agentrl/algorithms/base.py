"""What an algorithm is: which trajectories it takes, the credit of each token, and the names of its loss terms.

Credit is numpy on the whole batch, given between two passes of the trainer: ``infer`` (log-probabilities) before it,
``update`` after it. So it may look at any trajectory, group or turn, however the batch is cut later. Nothing here
imports torch; what runs in the gradient is named and lives in :mod:`agentrl.trainer.losses`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from agentrl.algorithms import importance, overlong
from agentrl.algorithms.aggregation import aggregate
from agentrl.algorithms.batch import TrainBatch
from agentrl.algorithms.kl import IN_REWARD, kl_estimate
from agentrl.errors import ConfigError, DataError
from agentrl.types import Group, Outcome, StopReason, Trajectory

if TYPE_CHECKING:
    from agentrl.config.schema import AlgorithmOptions


def trainable(trajectory: Trajectory) -> bool:
    """Whether a trajectory may enter a baseline and a loss.

    Infrastructure errors may not: their reward says nothing about the policy. Neither may an episode whose
    time ran out because the engine was slow, nor a trajectory in which the model sampled nothing.
    """
    theirs = trajectory.outcome is Outcome.INFRA_ERROR or trajectory.stop_reason is StopReason.ENGINE_TIMEOUT
    return not theirs and trajectory.num_sampled > 0


class Algorithm:
    """Subclass it, give :meth:`credit`, and name the class: ``--advantage-estimator my_file.py:MyAlgorithm``.

    Args:
        options: the section "Algorithm" of the run's options.
    """

    name: ClassVar[str] = "an algorithm of your own"
    compares: ClassVar[bool] = False
    """Members of a group are compared with each other: a trajectory without a second one is not trained on."""
    needs: ClassVar[tuple[str, ...]] = ()
    """Columns that credit or correction reads and the trainer infers first: ``old``, ``ref``, and ``values``, for which
    there is a critic; then :meth:`returns` is what that learns."""
    terms: ClassVar[tuple[str, ...]] = ("clipped_surrogate", "kl", "entropy")
    """Loss terms, by the name of a function in :mod:`agentrl.trainer.losses` or of a method of this class with the
    same arguments."""
    aggregation: str | Callable[[np.ndarray], np.ndarray] = "token-mean"
    """How the terms of tokens become one number unless ``--loss-agg-mode`` says, see
    :mod:`agentrl.algorithms.aggregation`."""
    sequence_ratio: ClassVar[bool] = False
    """The probability ratio is that of the whole trajectory, see :meth:`log_ratio`."""

    def __init__(self, options: AlgorithmOptions):
        self.options = options

    # -- what an algorithm says -------------------------------------------------------------------

    def credit(self, batch: TrainBatch) -> np.ndarray:
        """Advantage of each token, float[T]; what was not sampled is ignored. ``batch.spread`` makes it of a number a
        trajectory, ``self.rewards(batch)`` are the rewards."""
        raise NotImplementedError(f"{type(self).__name__} has no credit(batch)")

    def correction(self, batch: TrainBatch) -> np.ndarray | None:
        """Factor of each token's policy term, float[T], from log-probabilities before the step (``batch["rollout"]``,
        ``batch["old"]``): importance weights, or a mask. None: 1. By default what ``--use-tis`` and ``--use-rs`` say,
        see :mod:`agentrl.algorithms.importance`."""
        return importance.correction(batch, self.options)

    def returns(self, batch: TrainBatch) -> np.ndarray | None:
        """What the critic's value of each token is to be, float[T]. None: there is no critic."""
        return None

    def log_ratio(self, batch: TrainBatch) -> np.ndarray:
        """With ``sequence_ratio``: log of the trajectory's ratio on each of its tokens, float[T]. By default the mean
        of ``current`` - ``old`` over the trajectory (GSPO, arXiv:2507.18071, equation 7).

        The trainer infers ``current`` before each optimizer step, so the ratio is exact also where segments of a
        trajectory lie in different micro-batches or ranks. Its gradient goes through every token.
        """
        return batch.spread(batch.means(batch["current"] - batch["old"]))

    # -- what follows from it ---------------------------------------------------------------------

    @property
    def follows(self) -> bool:
        """Whether :meth:`in_step` makes columns of ``current``, which the trainer infers before each optimizer step."""
        return self.sequence_ratio or self.options.use_opsm

    def in_step(self, batch: TrainBatch) -> dict[str, np.ndarray]:
        """float32[T] by name, for one optimizer step, of a batch that has what :meth:`prepare` gave and ``current``:
        ``log_ratio`` of trajectories, ``correction`` and the tokens that ``--use-opsm`` leaves out, ``opsm_masked``."""
        columns: dict[str, np.ndarray] = {}
        if self.sequence_ratio:
            columns["log_ratio"] = self.log_ratio(batch)
        if self.options.use_opsm:
            masked = importance.too_far(batch, self.options)
            columns |= {"opsm_masked": masked, "correction": batch.columns.get("correction", batch.loss_mask) * ~masked}
        return {name: values.astype(np.float32) for name, values in columns.items()}

    def check(self, n_samples_per_prompt: int) -> None:
        """Raise ConfigError where so many episodes a task teach nothing, or options do not go together."""
        options = self.options
        kind = options.kl_loss_type
        if self.compares and n_samples_per_prompt < 2:
            raise ConfigError(
                f"--n-samples-per-prompt {n_samples_per_prompt} teaches nothing: {self.name} compares the episodes of "
                "one task, and one alone has advantage 0. Give at least 2."
            )
        if (options.use_tis or options.use_rs) and options.use_rollout_logprobs:
            raise ConfigError(
                f"{'--use-tis' if options.use_tis else '--use-rs'} compares the trainer's old log-probabilities with "
                "the engine's: give --no-use-rollout-logprobs, so that the trainer computes them."
            )
        if options.use_tis and options.tis_level == "token" and self.sequence_ratio:
            raise ConfigError(
                f"--tis-level token does not go with {self.name}, whose ratio is of a trajectory: give --tis-level "
                "sequence or geometric."
            )
        if options.use_opsm and set(self.terms) <= {"nll", "kl", "entropy"}:
            raise ConfigError(f"--use-opsm has no effect: {self.name}'s loss has no term of a policy that sampled.")
        for flag, low, high in (
            ("--tis-clip", options.tis_clip_low, options.tis_clip),
            ("--rs-upper-bound", options.rs_lower_bound, options.rs_upper_bound),
        ):
            if low > high:
                raise ConfigError(f"{flag} {high:g} is less than the lower bound {low:g}.")
        if options.use_kl_loss and kind == "k1" and not options.use_unbiased_kl:
            raise ConfigError(
                "--kl-loss-type k1 in the loss pulls nowhere: its expected gradient is 0. Add --use-unbiased-kl, or "
                "take k2, k3 or low_var_kl."
            )
        if options.use_unbiased_kl and kind == "k2":
            raise ConfigError(
                "--use-unbiased-kl weighs an estimate whose mean is the divergence: k1, k3 or low_var_kl, not k2."
            )
        for flag, given, term in (
            ("--eps-clip-c", options.eps_clip_c is not None, "clipped_surrogate"),
            ("--use-kl-loss", options.use_kl_loss, "kl"),
            ("--entropy-coef", options.entropy_coef > 0, "entropy"),
        ):
            if given and term not in self.terms:
                raise ConfigError(f"{flag} has no effect: the loss of {self.name} has no term {term}.")

    def select(self, groups: Iterable[Group]) -> set[str]:
        """Ids of the trajectories to train on: the trainable ones; where they are compared, those with another of their
        group. Agents of one episode have groups of their own, ``<group>/<agent>``.
        Raises DataError: a reward is not finite."""
        members: dict[str, list[Trajectory]] = defaultdict(list)
        for group in groups:
            for trajectory in group.trajectories:
                if not trainable(trajectory):
                    continue
                if not math.isfinite(trajectory.reward):
                    raise DataError(
                        f"reward of trajectory {trajectory.trajectory_id!r} is {trajectory.reward!r}, expected a "
                        "finite number; end such an episode with stop_reason=ENV_ERROR so that it is left out"
                    )
                members[trajectory.group_id].append(trajectory)
        least = 2 if self.compares else 1
        return {t.trajectory_id for those in members.values() if len(those) >= least for t in those}

    def infers(self, steps: int) -> tuple[str, ...]:
        """Columns that the trainer must infer before credit is given, for so many optimizer steps."""
        options, wanted = self.options, set(self.needs)
        if options.use_kl_loss and options.kl_loss_coef:
            wanted.add("ref")
        if options.kl_coef:
            wanted |= {"old", "ref"}
        if options.use_tis or options.use_rs:
            wanted.add("old")
        # With one step the model's own log-probabilities are the old ones, and are there anyway.
        if steps > 1 or self.follows:
            wanted.add("old")
        return tuple(sorted(wanted - {"old"} if options.use_rollout_logprobs else wanted))

    def prepare(self, batch: TrainBatch) -> dict[str, np.ndarray]:
        """Columns to add to a batch that has what :meth:`infers` names: ``old`` where it is the engine's,
        ``advantage``, ``correction``, ``returns``.
        Raises ConfigError: one of them has another shape than [T], or there is a critic and nothing that it is to
        learn."""
        columns: dict[str, np.ndarray] = {}
        if self.options.use_rollout_logprobs and "rollout" in batch.columns:  # nobody sampled what is written
            columns["old"] = batch["rollout"]
            batch = batch.with_columns(**columns)
        given = {
            "advantage": self.credit(batch), "correction": self.correction(batch), "returns": self.returns(batch)
        }  # fmt: skip
        if "values" in self.needs and given["returns"] is None:
            raise ConfigError(
                f"--advantage-estimator {self.name}: its `needs` name values, so there is a critic, but its "
                "returns(batch) does not say what that is to learn: give one number a token"
            )
        for name, values in given.items():
            if values is None:
                continue
            if np.shape(values) != (batch.num_tokens,):
                raise ConfigError(
                    f"--advantage-estimator {self.name}: its {name} has shape {np.shape(values)}, expected one number "
                    f"a token, ({batch.num_tokens},); batch.spread(values) makes it of a number a trajectory"
                )
            columns[name] = np.where(batch.loss_mask == 1, values, 0).astype(np.float32)
        if (in_loss := overlong.in_loss(batch, self.options)) is not None:
            columns["in_loss"] = in_loss * batch.in_loss
        return columns

    def metrics(self, batch: TrainBatch) -> dict[str, float]:
        """Of a batch with what :meth:`prepare` gave: what the correction did, and the share left out as truncated."""
        metrics = importance.correction_metrics(batch, self.options)
        if self.options.overlong_handling == "mask":
            metrics["train/overlong_masked"] = float(batch.truncated.mean())
        return metrics

    def aggregate(self, batch: TrainBatch, samples: Sequence[int]) -> np.ndarray:
        """float64[T]: the weight of each token in an optimizer step of these sequences."""
        how = self.options.loss_agg_mode or self.aggregation
        return aggregate(batch, samples, how, self.options.loss_scale_factor)

    def kl_to_reference(self, batch: TrainBatch) -> np.ndarray:
        """float[T]: the estimate of ``--kl-loss-type`` on each token, by default log(old / ref), whose sum over a
        trajectory has the KL to the reference for its mean."""
        kind = self.options.kl_loss_type or IN_REWARD
        return kl_estimate(batch["old"] - batch["ref"], kind, np.expm1)

    def rewards(self, batch: TrainBatch, *, kl: bool = True) -> np.ndarray:
        """float64[R]: rewards less ``--kl-coef`` times the trajectory's KL to the reference (RLOO, arXiv:2402.14740,
        equation 1), and less the penalty of ``--overlong-handling``."""
        rewards = batch.rewards - overlong.penalty(batch, self.options)
        if not (self.options.kl_coef and kl):
            return rewards
        return rewards - self.options.kl_coef * batch.sums(self.kl_to_reference(batch))

    def rewards_to_go(self, batch: TrainBatch, *, kl: bool = True) -> np.ndarray:
        """float64[R, 1]: :meth:`rewards`. With ``--credit-level turn`` float64[R, K]: what each trajectory earned from
        its turn k on, ``G_k = r_k + gamma G_{k+1}``; the KL of a turn's tokens is taken from its reward.

        After its last turn a trajectory keeps that turn's return. So a baseline of turn k is made of all members of the
        group, whenever they ended: it does not depend on how many turns there will be, and brings no bias. Where all
        is earned in the last turn and gamma is 1, every turn has the trajectory's reward.
        """
        if self.options.credit_level == "trajectory":
            return self.rewards(batch, kl=kl)[:, None]
        returns = batch.rewards_of_turns.copy()
        if self.options.kl_coef and kl:
            returns -= self.options.kl_coef * batch.sums_of_turns(self.kl_to_reference(batch))
        last = batch.turns_of - 1
        returns[np.arange(len(last)), last] -= overlong.penalty(batch, self.options)
        for turn in range(returns.shape[1] - 2, -1, -1):
            returns[:, turn] += np.where(turn < last, self.options.gamma * returns[:, turn + 1], 0)
        return np.take_along_axis(returns, np.minimum(np.arange(returns.shape[1]), last[:, None]), axis=1)


def zero_variance_fraction(batch: TrainBatch) -> float:
    """Share of trajectories whose advantage is 0 on every token, which teach nothing (0 when there is none)."""
    teaching = batch.sums(batch["advantage"] != 0)
    return float((teaching == 0).mean()) if len(teaching) else 0.0
