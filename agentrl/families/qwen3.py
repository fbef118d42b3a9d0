"""Qwen3: queries and keys are normalized."""

from agentrl.families.family import DENSE, Family, Model, Settings, dense


def settings(model: Model) -> Settings:
    return dense(model, qk_layernorm=True)


FAMILY = Family(settings, DENSE)
