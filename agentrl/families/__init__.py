"""Model families: what a checkpoint's ``config.json`` and tensors mean to Megatron-core. Imports no torch.

One small file a family: the fields of ``config.json`` it computes, Megatron's settings that follow from them, and the
names of the tensors on both sides. A field that is in no table is refused (`fields.py`), a tensor that is in none too.
"""

from __future__ import annotations

import functools
import importlib

from agentrl.families.family import Family, Model

MODULES = {
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "llama": "llama",
    "mistral": "llama",
    "smollm3": "smollm3",
    "glm4": "glm4",
    "qwen2_moe": "qwen2_moe",
    "qwen3_moe": "qwen3_moe",
    "mixtral": "mixtral",
    "glm4_moe": "glm4_moe",
    "deepseek_v3": "deepseek_v3",
    "kimi_k2": "deepseek_v3",
}
"""``model_type`` -> the file that knows it."""


@functools.cache
def family(model_type: str) -> Family:
    """Raises KeyError for a ``model_type`` that nobody knows."""
    return importlib.import_module(f"agentrl.families.{MODULES[model_type]}").FAMILY


def of(model: Model) -> Family | None:
    """The family of a ``config.json``; None where it is not known, or not said."""
    kind = model.get("model_type")
    return family(kind) if kind in MODULES else None
