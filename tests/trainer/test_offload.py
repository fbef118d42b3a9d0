"""Memory of a model in training, given back between its turns. Two ranks: test_layouts."""

from __future__ import annotations

import pytest
import torch

from agentrl.trainer.offload import Offload
from tests.trainer.ranks import three_steps

CPU = torch.device("cpu")


def test_views_stay_views_and_what_is_dropped_is_gone() -> None:
    kept, dropped = torch.arange(6.0), torch.ones(4)
    view, gradient = kept[2:4], dropped[1:]
    offload = Offload()
    assert offload.release(CPU, kept=[view, kept], dropped=[gradient, dropped]) == 6 * 4 + 4 * 4, "each storage once"
    assert kept.untyped_storage().nbytes() == dropped.untyped_storage().nbytes() == 0
    assert offload.release(CPU, kept=[kept], dropped=[]) == 0
    offload.resume()
    offload.resume()
    kept.add_(1)
    assert view.tolist() == [3, 4] and len(gradient.fill_(2)) == 3 and dropped[1:].tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    "options",
    [
        {"advantage_estimator": "ppo", "use_kl_loss": True},
        {"dtype": "bf16", "use_distributed_optimizer": True},
    ],
    ids=["critic and reference", "bf16 dist"],
)
def test_three_steps_with_memory_given_back_in_between_are_the_same_bit_for_bit(make_trainer, options) -> None:
    expected = three_steps(make_trainer(**options))
    given = three_steps(trainer := make_trainer(**options), offloads=True)
    assert given.keys() == expected.keys()
    assert all(torch.equal(expected[name], tensor) for name, tensor in given.items())
    trainer.release_memory()
    held = [t for part in trainer.parts.values() for t in part._lasting() if t.device.type == "cpu"]
    assert sum(t.untyped_storage().nbytes() for t in held if t.untyped_storage().resizable()) == 0
    trainer.resume_memory()


def test_a_state_is_saved_and_loaded_between_turns(make_trainer, tmp_path) -> None:
    trainer = make_trainer()
    three_steps(trainer, offloads=True)
    trainer.save(tmp_path)
    trainer.release_memory()
    trainer.resume_memory()
    trainer.load(tmp_path)
    expected = three_steps(trainer)
    trainer.load(tmp_path)
    given = three_steps(trainer, offloads=True)
    assert all(torch.equal(expected[name], tensor) for name, tensor in given.items())
