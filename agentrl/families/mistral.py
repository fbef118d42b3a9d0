"""Mistral: Llama's layers, in some versions with a sliding window."""

from agentrl.families.family import ATTENTION, MLP, NORMS, Family, dense

FAMILY = Family(dense, {**NORMS, **ATTENTION, **MLP})
