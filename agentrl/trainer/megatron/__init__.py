"""Megatron-core underneath: model, optimizer, forward-backward, export, state.

Import :mod:`agentrl.trainer.megatron.trainer` for the trainer itself. This package is imported
by worker processes only; importing it takes seconds (torch, Megatron-core).
"""
