"""`agentrl plan`: parameters counted from the checkpoint, memory of a layout, a layout that fits, its command."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path

import pytest

from agentrl.cli.main import main
from agentrl.config import Config, demo_folder, load_config
from agentrl.planning import GIB, Memory, Shape, memory_of, plans

LARGE = Shape(
    layers=36, hidden=4096, heads=32, groups=8, head_dim=128, ffn=12288, vocab=151936, tied=False, head_norms=True,
    split=192_937_984, whole=8448, experts=0, embedding=151936 * 4096,
)  # fmt: skip
"""Qwen3-8B."""
TRAINS = Config(dtype="bf16", actor_num_gpus_per_node=1, max_tokens_per_gpu=8192, rollout_max_context_len=4096)


def test_parameters_are_counted_from_the_checkpoint_or_its_config_alone(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(demo_folder())
    counted = Shape.of(demo_folder())
    assert counted.parameters == sum(p.numel() for p in model.parameters())
    (tmp_path / "config.json").write_text((demo_folder() / "config.json").read_text())
    assert Shape.of(tmp_path) == counted


def test_bytes_of_a_parameter() -> None:
    number = LARGE.parameters
    assert number == pytest.approx(8.19e9, rel=1e-3)
    one = memory_of(TRAINS, LARGE, "cuda")
    assert (one.weights, one.gradients, one.optimizer) == (2 * number, 4 * number, 12 * number)
    assert one.snapshot == 2 * number
    fp32 = memory_of(TRAINS.replace(dtype="fp32"), LARGE, "cuda")
    assert (fp32.weights, fp32.gradients, fp32.optimizer) == (4 * number, 4 * number, 8 * number)
    shared = memory_of(TRAINS.replace(actor_num_gpus_per_node=4, use_distributed_optimizer=True), LARGE, "cuda")
    assert (shared.weights, shared.optimizer) == (one.weights, one.optimizer / 4)
    # A token of KV cache: keys and values of 36 layers, 8 groups of 128 numbers, 2 bytes each.
    assert one.kv_cache == 64 * 4096 * 2 * 36 * 8 * 128 * 2
    assert one.reference == 0 and memory_of(TRAINS.replace(use_kl_loss=True), LARGE, "cuda").reference == 4 * number
    assert one.checkpoint == 14 * number, "float32 weights, two moments, and the model in bf16"
    lean = memory_of(TRAINS.replace(async_save=False, save_optim=False), LARGE, "cuda")
    assert lean.checkpoint == 4 * number and memory_of(TRAINS.replace(save_interval=0), LARGE, "cuda").checkpoint == 0


def test_a_critic_is_a_second_model_on_the_same_ranks() -> None:
    policy = memory_of(TRAINS, LARGE, "cuda")
    both = memory_of(TRAINS.replace(advantage_estimator="ppo"), LARGE, "cuda")
    assert [x / y for x, y in zip(parts(both), parts(policy), strict=True)] == [2, 2, 2, 1, 1]


def parts(memory: Memory) -> list[float]:
    return [memory.weights, memory.gradients, memory.optimizer, memory.engine_weights, memory.snapshot]


@pytest.mark.parametrize("option", ["tensor_model_parallel_size", "pipeline_model_parallel_size"])
def test_ranks_that_share_a_model_take_less(option: str) -> None:
    one, two = (
        memory_of(TRAINS.replace(actor_num_gpus_per_node=n, **{option: n}), LARGE, "cuda") for n in (1, 2)
    )  # fmt: skip
    assert 0.45 * one.weights < two.weights < 0.6 * one.weights


def test_recomputing_keeps_little_of_a_layer() -> None:
    def kept(**options) -> float:
        return memory_of(TRAINS.replace(**options), LARGE, "cuda").activations

    plain, mlp = kept(), kept(recompute_activations=True)
    full = kept(megatron={"recompute_granularity": "full"})
    assert plain > 1.5 * mlp > 3 * full
    scores = {"recompute_granularity": "selective"}  # of attention, of which none are kept anyway
    assert kept(megatron=scores) == plain and kept(megatron={**scores, "recompute_modules": ["mlp"]}) == mlp


def test_an_interleaved_pipeline_keeps_more_for_the_backward_pass() -> None:
    plain = TRAINS.replace(actor_num_gpus_per_node=4, pipeline_model_parallel_size=4)
    interleaved = plain.replace(megatron={"virtual_pipeline_model_parallel_size": 2})
    one, two = (memory_of(cfg, LARGE, "cuda").activations for cfg in (plain, interleaved))
    assert one < two < 2 * one


def test_the_first_plan_that_fits_is_the_plainest() -> None:
    def first(gpus: int, gib: float):
        return next(p for p in plans(Config(dtype="bf16"), LARGE, gpus, gib * GIB) if p.fits).config

    large, small = first(8, 192), first(8, 80)
    assert (large.model_parallel_size, large.megatron, large.actor_num_gpus_per_node) == (1, {}, 4)
    assert (small.model_parallel_size, small.actor_num_gpus_per_node, small.rollout_num_engines) == (2, 4, 4)
    assert not any(p.fits for p in plans(Config(dtype="bf16"), LARGE, 1, 80 * GIB))


def test_sides_that_take_turns_have_the_larger_of_both_in_place_of_the_sum() -> None:
    apart, shared = Config(dtype="bf16"), Config(dtype="bf16", colocate=True)

    def first(cfg: Config, gpus: int, gib: float):
        return next((p for p in plans(cfg, LARGE, gpus, gib * GIB) if p.fits), None)

    plan = first(shared, 4, 80)
    assert plan is not None and first(apart, 4, 80) is None
    assert (plan.config.world_size, plan.config.rollout_num_engines) == (4, 4), "all GPUs for both"
    assert plan.memory.trainer + plan.memory.engine > 80 * GIB
    assert plan.memory.offloaded == plan.memory.weights + plan.memory.optimizer
    kept = first(shared.replace(offload_train=False), 4, 80)
    assert kept is None, "then each has its share of a GPU all the time"


def test_the_command_is_one_that_train_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--env", "search", "--gpus", "4", "--gpu-memory", "24", "--lr", "1e-4"]) == 0
    words = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert words[:2] == ["agentrl", "train"]
    config = load_config(words[2:])
    assert (config.lr, config.world_size, config.rollout_num_engines) == (1e-4, 2, 2)


@pytest.mark.parametrize(
    "flags",
    [
        ["--gpus", "1", "--tensor-model-parallel-size", "2"],
        ["--gpus", "1", "--rollout-num-engines", "2"],
        ["--gpus", "2", "--rollout-num-engines", "2"],
        ["--gpus", "2", "--rollout-num-gpus", "2"],
        ["--gpus", "8", "--actor-num-gpus-per-node", "4", "--global-batch-size", "2"],
    ],
)
def test_a_layout_that_a_start_would_refuse_is_not_planned(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *flags]) == 2
    assert "no layout" in capsys.readouterr().err


def test_the_engines_memory_is_that_of_the_dry_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Batch and lengths are those of the model's preset."""
    monkeypatch.chdir(tmp_path)
    said = []
    for command in (["plan"], ["train", "--dry-run"]):
        assert main([*command, "--env", "search"]) == 0
        lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
        (line,) = [line for line in lines if line.startswith("an engine rank")]
        said.append(line.split())
    assert said[0] == said[1]


def test_several_machines() -> None:
    given = Config(dtype="bf16", actor_num_nodes=2, tensor_model_parallel_size=4, actor_num_gpus_per_node=4)
    plan = next(plans(given, LARGE, 8, 80 * GIB))
    assert (plan.config.world_size, plan.config.data_parallel_size, plan.config.rollout_num_engines) == (8, 2, 8)
    free = [p.config for p in plans(Config(dtype="bf16", actor_num_nodes=2), LARGE, 8, 80 * GIB)]
    assert {c.world_size // 2 for c in free} <= set(range(1, 8))
    assert all((c.world_size // 2) % c.tensor_model_parallel_size == 0 for c in free)
    spread = next(c for c in free if c.pipeline_model_parallel_size == 2 and c.world_size == 2)
    assert spread.data_parallel_size == 1, "stages may lie on two machines"
    assert not list(plans(given.replace(rollout_num_engines=3, rollout_num_gpus_per_engine=4), LARGE, 8, 80 * GIB))


def test_what_was_given_to_megatron_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--attention-dropout", "0.1", "--recompute-granularity", "selective"]
    assert main(["plan", "--gpus", "4", *given]) == 0
    words = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert words.count("--attention-dropout") == words.count("--recompute-granularity") == 1


def test_a_mixture_of_experts_is_split_by_tensor_only_with_its_sequences() -> None:
    mixture = dataclasses.replace(LARGE, experts=1_000_000)
    layouts = [p for p in plans(Config(dtype="bf16"), mixture, 8, 80 * GIB) if p.config.tensor_model_parallel_size > 1]
    assert layouts and all("--sequence-parallel" in p.flags() for p in layouts)
    dense = plans(Config(dtype="bf16"), LARGE, 8, 80 * GIB)
    assert not any("--sequence-parallel" in p.flags() for p in dense)


def test_what_does_not_fit_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--gpus", "1", "--gpu-memory", "0.1"]) == 1
    assert "Does not fit" in capsys.readouterr().out
    assert main(["plan", "--hf-checkpoint", str(tmp_path)]) == 2
    assert "config.json cannot be read" in capsys.readouterr().err
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 2}))
    assert main(["plan", "--hf-checkpoint", str(tmp_path)]) == 2
    assert "hidden_size" in capsys.readouterr().err
