"""Llama 2 and 3, SmolLM2 and others of this type."""

from agentrl.families.family import ATTENTION, MLP, NORMS, Family, dense

FAMILY = Family(dense, {**NORMS, **ATTENTION, **MLP})
