"""The demo model: a tiny Qwen3-architecture policy with its own tokenizer and tool-calling chat template.

:data:`MODEL_DIR` is the checkpoint that ships with the package; ``python -m agentrl.demo.build`` makes it again.
"""

from __future__ import annotations

from pathlib import Path

MODEL_DIR: Path = Path(__file__).resolve().parent.parent / "assets" / "demo"
"""The Hugging Face checkpoint of the demo model (bf16, under 4 MB)."""

__all__ = ["MODEL_DIR"]
