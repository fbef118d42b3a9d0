"""TP, PP, DP and sequence parallelism, and their combinations, on two and four processes against one."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from agentrl.families.family import head_dim, rotated_share
from tests.trainer.ranks import (
    BF16,
    ESTIMATORS,
    FOUR,
    LAYOUTS,
    MORE,
    OFFLOADED,
    OPTIONS,
    RELOADS,
    SPLIT,
    WITH_CRITIC,
    measure,
    one_step,
    run,
    run_families,
    run_layouts,
)
from tests.trainer.samples import join, listen, random_batch, tiny_checkpoint, train

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("layouts")


def spawn(target, names, *args, ranks=2):
    """Run these ranks, with a place to meet for each of ``names``."""
    import os

    import torch.multiprocessing as mp

    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        mp.spawn(target, args=({name: listen() for name in names}, *args), nprocs=ranks)
    finally:
        os.environ.pop("OMP_NUM_THREADS")
        if before is not None:
            os.environ["OMP_NUM_THREADS"] = before


@pytest.fixture(scope="module")
def results(checkpoint, out, alone):
    of_offloading = [f"{key} {offloads}" for key in OFFLOADED for offloads in (False, True)]
    spawn(run, [*LAYOUTS, *ESTIMATORS, *RELOADS, *of_offloading], checkpoint, str(out))
    return json.loads((out / "results.json").read_text())


def measure_alone(checkpoint, folder, options=OPTIONS):
    """The same numbers of one rank."""
    from agentrl.config.schema import TrainerOptions

    trainer = join(0, 1, listen(), checkpoint, TrainerOptions(**options))
    folder.mkdir()
    result = measure(trainer, folder, load_file(f"{checkpoint}/model.safetensors"))
    trainer.close()
    return result


@pytest.fixture(scope="module")
def alone(checkpoint, out):
    return measure_alone(checkpoint, out / "alone", WITH_CRITIC)


def assert_the_same(result, alone, folder, folder_alone):
    assert result["export_exact"]
    for here, there in zip(result["steps"], alone["steps"], strict=True):
        for key, value in there.items():
            assert here[key] == pytest.approx(value, rel=1e-4, abs=1e-6), key
    values, expected = (np.load(where / "log_probs.npy") for where in (folder, folder_alone))
    assert np.abs(values - expected)[0].max() < 1e-5 and np.abs(values - expected)[1:].max(initial=0) < 1e-3
    weights, expected = (load_file(where / "hf" / "model.safetensors") for where in (folder, folder_alone))
    assert weights.keys() == expected.keys()
    model = json.loads((folder_alone / "hf" / "config.json").read_text())
    for key, tensor in expected.items():
        apart = (weights[key] - tensor).abs()
        if key.endswith("k_proj.bias"):
            rotated = int(head_dim(model) * rotated_share(model))  # of the rest the gradient is what rounding leaves
            apart = apart.unflatten(0, (-1, head_dim(model)))[:, :rotated]
        assert apart.mean() < 1e-2 * OPTIONS["lr"], key


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_changes_nothing(results, alone, out, name):
    assert_the_same(results[name], alone, out / name, out / "alone")


@pytest.fixture(scope="module")
def more(checkpoint, out):
    """By number of ranks: the layouts that take longer."""
    for ranks, layouts in ((2, MORE), (4, FOUR)):
        spawn(run_layouts, layouts, layouts, ranks, checkpoint, str(out), WITH_CRITIC, ranks=ranks)
    return {ranks: json.loads((out / f"{ranks}.json").read_text()) for ranks in (2, 4)}


@pytest.mark.heavy
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("ranks", "name"), [*((2, name) for name in MORE), *((4, name) for name in FOUR)])
def test_layouts_that_take_longer_change_nothing_either(more, alone, out, ranks, name):
    assert_the_same(more[ranks][name], alone, out / name, out / "alone")


@pytest.fixture(scope="module")
def in_bf16(tmp_path_factory):
    out, options = tmp_path_factory.mktemp("bf16"), {**WITH_CRITIC, "dtype": "bf16"}
    checkpoint = tiny_checkpoint(out / "model", dtype="bfloat16")
    spawn(run_layouts, BF16, BF16, 2, checkpoint, str(out), options)
    return out, json.loads((out / "2.json").read_text()), measure_alone(checkpoint, out / "alone", options)


@pytest.mark.heavy
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", BF16)
def test_a_layout_in_bf16_differs_by_rounding(in_bf16, name):
    """A number in bfloat16 has eight bits, so a sum in another order is another one in its last bits: 3 % of loss and
    norm of the gradients, which are float32."""
    out, results, alone = in_bf16
    assert results[name]["export_exact"]
    for here, there in zip(results[name]["steps"], alone["steps"], strict=True):
        for key in ("train/loss", "train/grad_norm", "train/entropy", "critic/value_loss", "critic/grad_norm"):
            assert here[key] == pytest.approx(there[key], rel=3e-2, abs=3e-3), key
    values, expected = (np.load(where / "log_probs.npy") for where in (out / name, out / "alone"))
    assert np.abs(values - expected)[0].mean() < 2e-2
    state = load_file(out / name / "state" / "policy" / "model-tp0-pp0.safetensors")
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_estimator_gives_the_same_on_two_ranks(results, make_trainer, name):
    changes = {key: value for key, value in ESTIMATORS[name].items() if "parallel" not in key}
    alone = one_step(make_trainer(**{**OPTIONS, "use_rollout_logprobs": False, **changes}))
    assert alone.get("train/pg_loss", alone["train/loss"]) != 0 and alone["train/grad_norm"] > 0
    odd = ("train/tokens_per_s", "train/micro_batches", "time/train_steps")
    for key in alone.keys() - set(odd):
        assert results[name][key] == pytest.approx(alone[key], rel=1e-3, abs=1e-5), key


@pytest.mark.parametrize("key", RELOADS)
def test_state_saved_at_one_layout_loads_at_another(results, key):
    assert results[key]["exact"]


@pytest.mark.parametrize("key", OFFLOADED)
def test_memory_that_was_given_back_in_between_changes_no_weight(results, key):
    assert results[key] == {"exact": True}


def whole_state(core, folder):
    """What a saved state holds of a model, put together from its parts, and how far it is."""
    from agentrl.trainer.megatron.state import MOMENTS, _SavedTensors

    state = json.loads((folder / "state.json").read_text())
    saved = _SavedTensors(folder, state.pop("layout"), core.conversion)
    parameters = core._state._parameters.items()
    return {(kind, n): saved.local(kind, n, p) for n, p in parameters for kind in ("weight", *MOMENTS)}, state


@pytest.mark.parametrize("key", RELOADS)
def test_weights_and_moments_that_were_cut_anew_are_the_same_bit_for_bit(results, make_trainer, out, key):
    trainer = make_trainer(**WITH_CRITIC)
    for name in ("policy", "critic"):
        core = getattr(trainer, name).core
        (there, state), (here, went) = (whole_state(core, out / k / "state" / name) for k in (RELOADS[key], key))
        assert went == state and state["optimizer_steps"] == 4
        assert all(torch.equal(here[part], tensor) for part, tensor in there.items())
        assert any(tensor.any() for (kind, _), tensor in there.items() if kind == "exp_avg_sq")


@pytest.mark.parametrize("name", ["tp2 sp", "pp2 interleaved", "dp2 dist"])
def test_state_of_two_ranks_loads_at_one(results, make_trainer, out, name):
    trainer = make_trainer(**WITH_CRITIC)
    trainer.load(out / name / "state")
    saved = load_file(out / name / "hf" / "model.safetensors")
    assert all(torch.equal(saved[n], t) for n, t in trainer.export())
    assert trainer.policy.core.steps_done == trainer.critic.core.steps_done == 4
    critic = load_file(out / "alone" / "state" / "critic" / "model-tp0-pp0.safetensors")
    for key, parameter in trainer.critic.core.model.named_parameters():
        assert (parameter - critic[f"weight/{key}"]).abs().mean() < 1e-2 * WITH_CRITIC["critic_lr"], key
    loss = train(trainer, random_batch(12))["train/loss"]
    for key, result in results.items():
        if key.startswith(f"{name} to"):
            assert loss == pytest.approx(result["loss"], rel=1e-4)


@pytest.fixture(scope="module")
def family_checkpoints(out):
    paths = {}
    for kind in sorted({kind for kind, _ in SPLIT.values()}):
        changes = {"no_rope_layers": [1, 0]} if kind == "smollm3" else {}
        path = out / f"{kind} model"
        paths[kind] = tiny_checkpoint(path, kind, tie_word_embeddings=False, num_hidden_layers=2, **changes)
    return paths


@pytest.fixture(scope="module")
def families(family_checkpoints, families_alone, out):
    spawn(run_families, SPLIT, family_checkpoints, str(out))
    return json.loads((out / "families.json").read_text())


@pytest.fixture(scope="module")
def families_alone(family_checkpoints, out):
    return {kind: measure_alone(path, out / f"{kind} alone") for kind, path in family_checkpoints.items()}


@pytest.mark.heavy
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SPLIT)
def test_a_layout_changes_nothing_in_a_family(families, families_alone, out, name):
    kind = SPLIT[name][0]
    assert_the_same(families[name], families_alone[kind], out / name, out / f"{kind} alone")


@pytest.mark.heavy
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["qwen3_moe ep2", "mixtral ep2 dist", "glm4_moe ep2 tp2 sp", "deepseek_v3 pp2"])
def test_state_of_a_family_on_two_ranks_loads_at_one(families, family_checkpoints, make_trainer, out, name):
    """With the moments of the experts, which have an optimizer of their own where they are spread over ranks."""
    trainer = make_trainer(family_checkpoints[SPLIT[name][0]], **OPTIONS)
    trainer.load(out / name / "state")
    saved = load_file(out / name / "hf" / "model.safetensors")
    assert all(torch.equal(saved[n], t) for n, t in trainer.export())
    (optimizer,) = trainer.policy.core._state._optimizers
    moments = [optimizer.optimizer.state[p]["exp_avg_sq"] for p in optimizer.get_parameters()]
    assert all(moment.any() for moment in moments)


@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_experts_of_one_rank_are_dealt_to_two_bit_for_bit(families, family_checkpoints, make_trainer, out):
    core = make_trainer(family_checkpoints["mixtral"], **OPTIONS).policy.core
    there, state = whole_state(core, out / "mixtral alone" / "state" / "policy")
    here, went = whole_state(core, out / "mixtral ep2 dist" / "of one" / "policy")
    assert went == state and all(torch.equal(here[part], tensor) for part, tensor in there.items())
