import argparse
import dataclasses
import subprocess
import sys

import pytest

from agentrl.config import foreign, megatron_options
from agentrl.errors import ConfigError

pytestmark = pytest.mark.skipif(
    foreign.package_folder("sglang") is None or foreign.package_folder("megatron") is None,
    reason="options of SGLang and Megatron are checked where both are installed",
)


def test_sglang_options_are_typed(load):
    cfg = load(
        "--sglang-mem-fraction-static",
        "0.3",
        "--sglang-enable-metrics",
        "--sglang-context-length",
        "8k",
        "--sglang-log-level",
        "warning",
        "--sglang-lora-paths",
        '["a"]',
    )
    assert cfg.sglang == {
        "mem_fraction_static": 0.3,
        "enable_metrics": True,
        "context_length": 8000,
        "log_level": "warning",
        "lora_paths": ["a"],
    }


def test_sglang_aliases_lead_to_one_name(load):
    assert load("--sglang-expert-parallel-size", "2").sglang == load("--sglang-ep-size", "2").sglang


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (("--sglang-mem-fraction", "1"), ("--sglang-mem-fraction", "--sglang-mem-fraction-static")),
        (("--sglang-context-length", "long"), ("a whole number", "'long'")),
        (("--sglang-context-length",), ("a whole number", "nothing")),
        (("--sglang-port", "1"), ("--sglang-port cannot be set", "free port")),
        (("--sglang-api-key", "x"), ("--sglang-api-key cannot be set", "random key")),
        (("--sglang-model-path", "x"), ("--hf-checkpoint",)),
        (("--sglang-model", "x"), ("--hf-checkpoint",)),
        (("--sglang-tp-size", "2"), ("--rollout-num-gpus-per-engine",)),
        (("--sglang-tensor-parallel-size", "2"), ("--rollout-num-gpus-per-engine",)),
        (("--sglang-host", "0.0.0.0"), ("--sglang-host cannot be set", "own address")),
        (("--sglang-dtype", "half"), ("--dtype",)),
    ],
)
def test_wrong_sglang_options(refused, flags, parts):
    message = refused(*flags)
    assert all(part in message for part in parts), message


def test_megatron_options_are_typed(load):
    cfg = load(
        "--no-bias-dropout-fusion",
        "--adam-eps",
        "1e-3",
        "--recompute-granularity",
        "selective",
        "--num-layers",
        "4",
        "--overlap-grad-reduce",
        "--recompute-modules",
        "mlp",
        "core_attn",
    )
    assert cfg.megatron == {
        "bias_dropout_fusion": False,
        "adam_eps": 1e-3,
        "recompute_granularity": "selective",
        "num_layers": 4,
        "overlap_grad_reduce": True,
        "recompute_modules": ["mlp", "core_attn"],
    }


def test_our_own_options_come_before_megatrons(load):
    cfg = load("--lr", "1e-3", "--clip-grad", "0.5", "--sequence-parallel", "--tensor-model-parallel-size", "2")
    assert cfg.megatron == {} and (cfg.lr, cfg.clip_grad, cfg.sequence_parallel) == (1e-3, 0.5, True)


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (("--moe-router-topkk", "2"), ("--moe-router-topkk", "--moe-router-topk?")),
        (("--moe-router-topk", "two"), ("a whole number", "'two'")),
        (("--recompute-granularity", "some"), ("full, selective", "'some'")),
        (("--activation-func", "relu"), ("an object",)),
        (("--params-dtype", "bf16"), ("--dtype",)),
        (("--no-moe-router-topk",), ("--no-moe-router-topk",)),
    ],
)
def test_wrong_megatron_options(refused, flags, parts):
    message = refused(*flags)
    assert all(part in message for part in parts), message


def test_without_the_packages_sglang_options_pass_unchecked(load, refused, monkeypatch):
    monkeypatch.setattr(foreign, "sglang_fields", lambda: None)
    monkeypatch.setattr(megatron_options, "megatron_fields", lambda: None)
    monkeypatch.setattr("agentrl.config.parse.megatron_fields", lambda: None)
    assert load("--sglang-anything", "0.5", "--sglang-switch").sglang == {"anything": 0.5, "switch": True}
    assert "pip install 'agentrl-toolkit[train]'" in refused("--moe-something", "2")


def test_reading_the_options_imports_nothing():
    code = (
        "import sys; from agentrl.config import foreign; assert foreign.megatron_fields() and foreign.sglang_fields();"
        "sys.exit(bool({'torch', 'sglang', 'megatron.core'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.slow
def test_what_is_read_is_what_megatron_declares():
    optimizer = pytest.importorskip("megatron.core.optimizer")
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.transformer import MLATransformerConfig

    real = {
        field.name: field
        for cls in (MLATransformerConfig, optimizer.OptimizerConfig, DistributedDataParallelConfig)
        for field in dataclasses.fields(cls)
        if not field.name.startswith("_")
    }
    read = foreign.megatron_fields()
    assert set(read) == set(real)
    for name, field in real.items():
        if field.type in (int, float, bool, str):
            assert read[name].kind == field.type.__name__, name


@pytest.mark.slow
def test_what_is_read_is_what_the_server_accepts():
    from agentrl.engines import cpu_backend

    cpu_backend.install()
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    real = {
        option[2:]: action for action in parser._actions for option in action.option_strings if option.startswith("--")
    }
    read = foreign.sglang_fields()
    assert set(real) - {"help"} <= set(read)
    for flag in set(real) - {"help"}:
        takes_none = real[flag].nargs == 0
        assert (read[flag].kind == "bool") == takes_none, flag


def test_owned_names_are_real():
    assert {name for name in foreign.SGLANG_OWNED if name.replace("_", "-") not in foreign.sglang_fields()} == set()
    with pytest.raises(ConfigError):
        megatron_options.megatron_field("--bf16", "bf16")


@pytest.mark.parametrize(
    ("flags", "how"),
    [
        (["--sglang-trust-remote-code"], "code of the model folder is run"),
        (["--sglang-custom-weight-loader", "mine.load"], "a module that it names is imported"),
        (["--sglang-enable-custom-logit-processor"], "unpickled"),
    ],
)
def test_options_that_run_code_of_others_need_leave(load, refused, flags, how):
    assert how in refused(*flags) and "--allow-remote-code" in refused(*flags)
    assert load(*flags, "--allow-remote-code").sglang


def test_options_that_run_code_of_others_are_sglangs_own():
    known = {field.name for field in foreign.sglang_fields().values()}
    assert set(foreign.SGLANG_CODE) <= known
