"""SmolLM3: Llama's layers, some of which know no positions."""

from agentrl.families.family import DENSE, Family, Model, Settings, dense, words


def settings(model: Model) -> Settings:
    layers, interval = model.get("num_hidden_layers") or 0, model.get("no_rope_layer_interval") or 4
    rotated = model.get("no_rope_layers") or [(n + 1) % interval for n in range(layers)]
    return dense(model, no_rope_freq=[int(not rotates) for rotates in rotated])


FAMILY = Family(settings, DENSE, fields=words("no_rope_layers no_rope_layer_interval"))
