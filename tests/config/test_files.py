import json

import pytest

from agentrl.config import Config, load_config
from agentrl.config.serialize import read_run_config
from agentrl.errors import ConfigError

TOML = """
env = "search"
lr = 1e-6
num-rollout = 3
eval_interval = 1
[env_args]
two_hop = 0.5
[sglang]
mem_fraction_static = 0.5
[megatron]
moe_router_topk = 2
"""
YAML = """
env: search
lr: 1e-6
num-rollout: 3
eval_interval: 1
env_args: {two_hop: 0.5}
sglang: {mem_fraction_static: 0.5}
moe_router_topk: 2
"""
JSON = json.dumps(
    {
        "env": "search",
        "lr": 1e-6,
        "num_rollout": 3,
        "eval_interval": 1,
        "env_args": {"two_hop": 0.5},
        "sglang_mem_fraction_static": 0.5,
    }
    | {"megatron": {"moe_router_topk": 2}}
)


@pytest.fixture
def from_file(tmp_path, model):
    def load(text, suffix=".toml", *flags):
        path = tmp_path / f"run{suffix}"
        path.write_text(text)
        return load_config(["--config", str(path), "--hf-checkpoint", model, *flags])

    return load


@pytest.mark.parametrize(("suffix", "text"), [(".toml", TOML), (".yaml", YAML), (".yml", YAML), (".json", JSON)])
def test_all_forms_mean_the_same(from_file, suffix, text):
    cfg = from_file(text, suffix)
    assert (cfg.env, cfg.lr, cfg.num_rollout, cfg.eval_interval) == ("search", 1e-6, 3, 1)
    assert cfg.env_args == {"two_hop": 0.5}
    assert cfg.sglang == {"mem_fraction_static": 0.5}
    assert cfg.megatron == {"moe_router_topk": 2}


def test_flags_win_and_mappings_merge(from_file):
    cfg = from_file(TOML, ".toml", "--lr", "2e-6", "--env-arg", "topk=2", "--sglang-context-length", "4096")
    assert cfg.lr == 2e-6
    assert cfg.env_args == {"two_hop": 0.5, "topk": 2}
    assert cfg.sglang == {"mem_fraction_static": 0.5, "context_length": 4096}


@pytest.mark.parametrize(
    ("suffix", "text", "parts"),
    [
        (".toml", 'env = "search"\nrollout_batchsize = 3', ("rollout_batchsize", "rollout_batch_size")),
        (".toml", 'env = "search"\nlr = "fast"', ("run.toml: lr", "a number", "'fast'")),
        (".toml", 'env = "search"\nlr = "1e-6"', ("run.toml: lr", "a number")),
        (".toml", 'env = "search"\nnum_rollout = 2.5', ("num_rollout", "a whole number", "2.5")),
        (".toml", 'env = "search"\nnum_rollout = true', ("num_rollout", "a whole number", "True")),
        (".toml", 'env = "search"\ntensorboard = 1', ("tensorboard", "true or false", "1")),
        (".toml", 'env = "search"\nenv_args = 3', ("env_args", "table", "3")),
        (".toml", 'env = "search"\ngroup_rm = true', ("group_rm", "not available yet")),
        (".toml", 'env = "search"\neval_prompt_data = ["x"]', ("eval_prompt_data", "pairs")),
        (".toml", "env = x\n", ("run.toml", "not valid TOML", "line 1")),
        (".yaml", "env: [", ("run.yaml", "not valid YAML", "line")),
        (".yaml", "- a", ("run.yaml", "keys and values", "list")),
        (".json", "{", ("run.json", "not valid JSON", "line 1")),
        (".ini", "", ("run.ini", ".toml, .yaml or .json")),
        (".toml", "[sglang]\nmem_fraction = 0.5", ("sglang.mem_fraction", "mem-fraction-static")),
        (".toml", "[sglang]\nport = 1", ("sglang.port", "free port")),
        (".toml", "[megatron]\nmoe_router_topkk = 1", ("megatron.moe_router_topkk", "moe_router_topk")),
        (".toml", '[megatron]\nmoe_router_topk = "2"', ("megatron", "a whole number", "'2'")),
    ],
)
def test_wrong_files_name_the_place(from_file, suffix, text, parts):
    with pytest.raises(ConfigError) as caught:
        from_file(text, suffix)
    assert all(part in str(caught.value) for part in parts), caught.value


def test_a_missing_file_is_named():
    with pytest.raises(ConfigError, match="nowhere.toml"):
        load_config(["--config", "nowhere.toml"])


def test_empty_file_changes_nothing(from_file):
    assert from_file("", ".yaml", "--env", "search").env == "search"


def test_named_files_as_a_table(from_file, tmp_path):
    (tmp_path / "held.jsonl").write_text("{}\n")
    cfg = from_file(f'env = "search"\neval_interval = 1\n[eval_prompt_data]\nheld = "{tmp_path}/held.jsonl"')
    assert cfg.eval_prompt_data == (("held", f"{tmp_path}/held.jsonl"),)


def test_saved_configuration_loads_again(from_file, load):
    cfg = load("--lr", "1e-5", "--env-arg", "topk=3", "--adam-eps", "1e-5")
    text = json.dumps(cfg.to_dict())
    assert Config.from_dict(json.loads(text)) == cfg
    assert from_file(text, ".json") == cfg


def test_a_stored_run_with_an_option_that_is_gone_loads(load, tmp_path):
    values = load().to_dict()
    (tmp_path / "config.json").write_text(json.dumps(values | {"host": "127.0.0.1"}))
    assert read_run_config(tmp_path) == values
    assert Config.from_dict(values | {"host": "127.0.0.1"}) == load()


def test_from_dict_is_strict(load):
    values = load().to_dict()
    with pytest.raises(ConfigError, match="lrr"):
        Config.from_dict(values | {"lrr": 1})
    with pytest.raises(ConfigError, match="lr"):
        Config.from_dict(values | {"lr": "1"})
