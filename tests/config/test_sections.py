"""A reader is handed its section of the options, whose fields and defaults are declared once."""

import dataclasses

import pytest

from agentrl.config import Config
from agentrl.config.schema import OptimizerOptions, TrainerOptions


def test_a_section_holds_its_options_and_no_others(load):
    config = load("--lr", "3e-5", "--tensor-model-parallel-size", "2", "--num-rollout", "7")
    trainer = config.section(TrainerOptions)
    assert (trainer.lr, trainer.tensor_model_parallel_size, trainer.total_steps) == (3e-5, 2, 7)
    assert not hasattr(trainer, "env") and not hasattr(trainer, "output_dir")
    assert trainer.section(OptimizerOptions).lr == 3e-5
    with pytest.raises(dataclasses.FrozenInstanceError):
        trainer.lr = 1.0


def test_a_sections_defaults_are_those_of_the_command():
    fields = {field.name: getattr(Config(), field.name) for field in dataclasses.fields(TrainerOptions)}
    assert TrainerOptions(**fields) == TrainerOptions()
