"""Every option of Megatron-core acts, must agree with the checkpoint, or is refused with a reason."""

import json

import pytest

from agentrl.config import foreign
from agentrl.config import megatron_options as options
from agentrl.config.schema import ParallelOptions

pytestmark = pytest.mark.skipif(foreign.package_folder("megatron") is None, reason="reads the installed megatron-core")

QWEN3 = {
    "model_type": "qwen3", "num_hidden_layers": 28, "hidden_size": 1024, "intermediate_size": 3072,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000},
}  # fmt: skip


def problems(model=QWEN3, **given):
    return list(options.problems(given, model))


def test_every_option_of_the_installed_megatron_is_in_exactly_one_table():
    settable = {name for name, field in foreign.megatron_fields().items() if field.kind != "opaque"}
    tables = [options.ACTS, options.CHECKPOINT.keys(), options.ONLY.keys(), options.OWNED.keys()]
    for name in settable:
        listed = sum(name in table for table in tables)
        refused = bool(options.refusal(name)) and name not in options.OWNED
        assert listed + refused == 1, name
        assert "does not know" not in (options.refusal(name) or ""), name
    named = {name for table in (*tables, options.REFUSED) for name in table if not name.endswith("*")}
    assert named <= set(foreign.megatron_fields())


def test_an_option_of_a_newer_megatron_is_refused():
    (problem,) = problems(warp_factor=9)
    assert problem == "--warp-factor 9 cannot be set: this version of agentrl does not know what it does."


def test_what_the_checkpoint_says_may_be_said_again():
    given = dict(
        num_layers=28, hidden_size=1024, ffn_hidden_size=3072, num_attention_heads=16, num_query_groups=8,
        kv_channels=128, layernorm_epsilon=1e-6, rotary_base=1000000.0, rotary_percent=1.0, normalization="RMSNorm",
        qk_layernorm=True, add_qkv_bias=False, add_bias_linear=False, gated_linear_unit=True, rotary_interleaved=False,
        softmax_scale=128**-0.5, hidden_dropout=0.0, attention_dropout=0.0, attention_softmax_in_fp32=True,
        grad_reduce_in_fp32=True, optimizer="adam", mtp_num_layers=0, num_moe_experts=None, window_size=None,
    )  # fmt: skip
    assert problems(**given) == []
    assert options.passed_on(given) == {}  # Megatron is told by the checkpoint alone
    assert problems(model={}, num_layers=5, qk_layernorm=True) == []  # no such keys: the trainer looks again


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("rotary_base", 5.0, "rope_theta 1000000"),
        ("rotary_interleaved", True, "does not agree"),
        ("rotary_percent", 0.5, "does not agree"),
        ("normalization", "LayerNorm", "normalization RMSNorm"),
        ("layernorm_epsilon", 0.1, "rms_norm_eps 1e-06"),
        ("qk_layernorm", False, "queries and keys True"),
        ("add_qkv_bias", True, "does not agree"),
        ("add_bias_linear", True, "does not agree"),
        ("softmax_scale", 1.0, "does not agree"),
        ("window_size", [128, 0], "attention window in force None"),
        ("hidden_dropout", 0.1, "samples without dropout"),
        ("attention_dropout", 0.5, "samples without dropout"),
        ("num_moe_experts", 8, "architecture has"),
        ("moe_router_topk", 8, "architecture has"),
        ("optimizer", "foo", "only adam"),
        ("optimizer", "sgd", "Adam's two moments"),
        ("mtp_num_layers", 1, "multi-token prediction"),
        ("mtp_loss_scaling_factor", 0.3, "multi-token prediction"),
        ("grad_reduce_in_fp32", False, "summed in float32"),
        ("tensor_model_parallel_size", 2, "use --tensor-model-parallel-size"),
        ("fp8", "hybrid", "8 or 4 bits"),
        ("check_for_nan_in_grad", True, "left out and counted"),
    ],
)
def test_what_changes_the_mathematics_is_refused(name, value, text):
    (problem,) = problems(**{name: value})
    assert problem.startswith(f"--{name.replace('_', '-')} {value} ") and text in problem


def test_what_megatron_cannot_recompute_here_is_refused():
    (problem,) = problems(recompute_modules=["mlp", "layernorm"])
    assert problem.startswith("--recompute-modules mlp layernorm cannot be set")
    assert problems(recompute_modules=["mlp"]) == []


VIRTUAL = "virtual_pipeline_model_parallel_size"
FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
FULL = {"recompute_granularity": "full", "recompute_method": "block"}


@pytest.mark.parametrize(
    ("given", "stages", "text"),
    [
        ({"adam_eps": 0.0}, 1, "--adam-eps 0.0: it must be more than 0"),
        ({"adam_eps": float("nan")}, 1, "--adam-eps nan: it must be more than 0"),
        ({"bucket_size": 0, "overlap_grad_reduce": True}, 1, "--bucket-size 0 is too small"),
        ({"bucket_size": 9}, 1, "--bucket-size 9 would do nothing: it needs --overlap-grad-reduce."),
        ({"overlap_grad_reduce": True, "overlap_param_gather": True}, 1, "it needs --use-distributed-optimizer"),
        ({"recompute_granularity": "full"}, 1, "needs --recompute-method and --recompute-num-layers"),
        ({**FULL, "recompute_num_layers": -1}, 1, "--recompute-num-layers -1 is too small"),
        ({**FULL, "recompute_num_layers": 5}, 1, "--recompute-num-layers 5 is more than the 4 layers"),
        ({**FULL, "recompute_num_layers": 3}, 2, "--recompute-num-layers 3 is more than the 2 layers"),
        ({**FULL, "recompute_num_layers": 2, VIRTUAL: 2}, 2, "--recompute-num-layers 2 is more than the 1 layers"),
        ({"recompute_num_layers": 1}, 1, "would do nothing: it needs --recompute-granularity full"),
        ({"recompute_modules": ["mlp"]}, 1, "--recompute-modules mlp would do nothing"),
        ({VIRTUAL: 1}, 2, "too small: it must be at least 2"),
        ({VIRTUAL: 2}, 1, "needs --pipeline-model-parallel-size of at least 2"),
        ({VIRTUAL: 3}, 2, "does not divide the 2 layers of a pipeline stage"),
        ({VIRTUAL: 2, "batch_p2p_comm": True}, 2, "--batch-p2p-comm does not go with"),
        ({FIRST: 1}, 1, f"--{FIRST.replace('_', '-')} 1 would do nothing"),
        ({FIRST: 0}, 2, "too small: it must be at least 1"),
        ({FIRST: 4}, 2, "leaves 0 for 1 other stages"),
        ({FIRST: 1, LAST: 1}, 2, "leaves 2 for 0 other stages"),
        ({FIRST: 1}, 3, "leaves 3 for 2 other stages"),
        ({LAST: 1, VIRTUAL: 2}, 2, "does not divide the 1 layers"),
        ({}, 3, "--pipeline-model-parallel-size 3 does not divide the model's num_hidden_layers 4"),
    ],
)  # fmt: skip
def test_what_megatron_would_find_late_or_leave_without_effect_is_refused(given, stages, text):
    (problem,) = options.layout_problems(given, ParallelOptions(pipeline_model_parallel_size=stages), layers=4)
    assert text in problem


def test_what_goes_together_is_accepted():
    parallel = ParallelOptions(pipeline_model_parallel_size=2, use_distributed_optimizer=True)
    given = {**FULL, "recompute_num_layers": 1, VIRTUAL: 2, "overlap_grad_reduce": True, "overlap_param_gather": True}
    assert not list(options.layout_problems(given, parallel, 4))
    assert not list(options.layout_problems({FIRST: 1, "adam_eps": 1e-6}, parallel, 4))
    mlp = ParallelOptions(recompute_activations=True)
    assert not list(options.layout_problems({"recompute_modules": ["mlp"]}, mlp, 4))


def test_all_of_a_command_line_is_refused_before_anything_starts(load, refused, model):
    with open(f"{model}/config.json") as f:
        config = json.load(f)
    with open(f"{model}/config.json", "w") as f:
        json.dump({**config, **QWEN3, "num_hidden_layers": 4}, f)
    message = refused("--rotary-base", "5", "--hidden-dropout", "0.1", "--optimizer", "foo", "--mtp-num-layers", "1")
    assert len(message.splitlines()) == 4
    assert load("--rotary-base", "1000000", "--num-layers", "4").megatron["rotary_base"] == 1000000
