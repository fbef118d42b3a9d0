"""Llama 2 and 3, SmolLM2 and others of this type; Mistral, which in some versions has a sliding window."""

from agentrl.families.family import ATTENTION, MLP, NORMS, Family, dense

FAMILY = Family(dense, {**NORMS, **ATTENTION, **MLP})
