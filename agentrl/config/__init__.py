"""Typed, frozen configuration: flags and files in, one validated object out."""

from agentrl.config.layers import Resolved, load_config, load_eval_config, resolve
from agentrl.config.presets import PRESETS, demo_folder
from agentrl.config.schema import Config, EvalConfig
from agentrl.config.validate import validate

__all__ = [
    "PRESETS",
    "Config",
    "EvalConfig",
    "Resolved",
    "demo_folder",
    "load_config",
    "load_eval_config",
    "resolve",
    "validate",
]
