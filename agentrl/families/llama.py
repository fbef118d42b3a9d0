"""Llama 2 and 3, SmolLM2 and others of this type; Mistral, which in some versions has a sliding window."""

from agentrl.families.family import DENSE, Family, dense

FAMILY = Family(dense, DENSE)
