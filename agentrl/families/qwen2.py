"""Qwen2 and Qwen2.5: biases of queries, keys and values."""

from agentrl.families.family import DENSE, Family, Model, Settings, dense


def settings(model: Model) -> Settings:
    return dense(model, add_qkv_bias=True)


FAMILY = Family(settings, DENSE)
