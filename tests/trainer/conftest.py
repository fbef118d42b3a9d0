"""A tiny random Qwen3 checkpoint, and trainers that leave their process groups."""

from __future__ import annotations

import gc
import os

import pytest

from tests.trainer.samples import QUIET, join, listen, tiny_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> str:
    return tiny_checkpoint(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(autouse=True)
def few_descriptors():
    """The process groups of a closed trainer go with its reference cycles, and many shells allow 1,024 descriptors."""
    yield
    if len(os.listdir("/proc/self/fd")) > 500:
        gc.collect()


@pytest.fixture
def make_trainer(checkpoint):
    """Makes trainers of one rank in this process, one at a time; the last one is closed after the test."""
    from agentrl.config.schema import TrainerOptions

    running = []

    def make(path=checkpoint, **options):
        while running:
            running.pop().close()
        options = {**QUIET, "lr": 1e-3, "max_tokens_per_gpu": 128, **options}
        trainer = join(0, 1, listen(), path, TrainerOptions(**options))
        running.append(trainer)
        return trainer

    yield make
    while running:
        running.pop().close()
