"""``--colocate`` and what follows from it, or does not go with it."""

from __future__ import annotations

import pytest


def test_engines_follow_from_the_ranks_and_both_sides_offload(load):
    cfg = load("--colocate", "--actor-num-gpus-per-node", "4", "--rollout-num-gpus-per-engine", "2")
    assert (cfg.rollout_num_engines, cfg.rollout_num_gpus) == (2, 4)
    assert cfg.takes_turns and cfg.offload_train and cfg.offload_rollout
    assert not load("--colocate", "--no-offload-train").offload_train
    apart = load()
    assert not (apart.takes_turns or apart.offload_train or apart.offload_rollout)
    assert load("--colocate", "--actor-num-gpus-per-node", "4", "--rollout-num-engines", "2").rollout_num_gpus == 2


def test_half_a_run_takes_no_turns(load):
    assert not load("--colocate", "--debug-rollout-only").takes_turns


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--async-buffer-size", "1"), "nobody generates while the trainer has the devices"),
        (("--rollout-num-gpus", "2"), "1 trainer ranks, and 2 engines of 1 take 2: give --rollout-num-gpus 1"),
        (
            ("--actor-num-nodes", "2", "--actor-num-gpus-per-node", "3", "--rollout-num-gpus-per-engine", "2"),
            "2 does not divide the 3 ranks of a machine",
        ),
        (("--pause-mode", "in_place"), "which is `retract`"),
    ],
)
def test_what_does_not_go_together_is_refused(refused, flags, said):
    assert said in refused("--colocate", *flags)


def test_offloading_is_of_colocated_sides(refused, load):
    assert "--offload-train has no effect without --colocate" in refused("--offload-train")
    assert load("--colocate", "--no-offload-rollout", "--pause-mode", "in_place").pause_mode == "in_place"
