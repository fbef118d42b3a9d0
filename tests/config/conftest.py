"""A model folder in Hugging Face form (its config only), and loading with it."""

import json

import pytest

from agentrl.config import load_config
from agentrl.errors import ConfigError

SIZES = {
    "num_hidden_layers": 4,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16384,
}


@pytest.fixture
def model(tmp_path):
    """Path of a model with four layers and heads."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SIZES))
    return str(folder)


@pytest.fixture
def load(model):
    """``load("--lr", "1e-6")``: a configuration with an environment, a model and these flags."""
    return lambda *flags: load_config(["--env", "search", "--hf-checkpoint", model, *flags])


@pytest.fixture
def refused(load):
    """``refused("--lr", "x")``: the message of the ConfigError these flags raise."""

    def message(*flags):
        with pytest.raises(ConfigError) as caught:
            load(*flags)
        return str(caught.value)

    return message
