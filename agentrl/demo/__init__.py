"""The models of the demonstrations: the embedded one, and SmolLM2 (:mod:`agentrl.demo.smollm2`)."""

from __future__ import annotations

from pathlib import Path

from agentrl.config.presets import demo_folder

MODEL_DIR: Path = demo_folder()
"""The Hugging Face checkpoint of the embedded model (a tiny Qwen3, bf16, under 4 MB); `envs_examples/demo_model`
makes it again."""

__all__ = ["MODEL_DIR"]
