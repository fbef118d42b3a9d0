"""Megatron's distributed checkpoints, to and from Hugging Face folders."""

from __future__ import annotations

import json
import pickle
import resource
import shutil
from argparse import Namespace
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from agentrl.errors import CheckpointError, StorageError
from tests.trainer.samples import tiny_checkpoint

FURTHER = {"model.layers.2.eh_proj.weight": torch.randn(4, 8), "model.layers.2.mlp.up_proj.weight": torch.ones(2)}
QUIET = print


def to_dist(*args):
    from agentrl.trainer.megatron.dist_checkpoint import to_dist

    to_dist(*map(Path, args), QUIET)


def to_hf(*args):
    from agentrl.trainer.megatron.dist_checkpoint import to_hf

    to_hf(*map(Path, args), QUIET)


def index_of(folder):
    """Key -> shape and dtype."""
    from agentrl.trainer.megatron.dist_checkpoint import read_index

    return {key: (tuple(tensor.size), tensor.properties.dtype) for key, tensor in read_index(folder).items()}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Makes a tiny checkpoint of two layers, once."""
    made = {}

    def make(kind, **changes):
        key = (kind, *sorted(changes.items()))
        if key not in made:
            changes = {"num_hidden_layers": 2, "tie_word_embeddings": False, **changes}
            made[key] = tiny_checkpoint(tmp_path_factory.mktemp(kind), kind, **changes)
        return Path(made[key])

    return make


@pytest.fixture(scope="module")
def dense(models):
    return models("qwen3")


@pytest.fixture(scope="module")
def converted(dense, tmp_path_factory):
    target = tmp_path_factory.mktemp("dist") / "converted"
    to_dist(dense, target)
    return target


def copied(folder, tmp_path):
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def save_as_megatron(checkpoint, folder, metadata=None, *, layer_freq=None, beside=None):
    """What Megatron-LM saves of this model in one process, but for the processes that it forks to write."""
    from agentrl.config.schema import TrainerOptions
    from agentrl.trainer.megatron import cpu
    from agentrl.trainer.megatron import model as models
    from agentrl.trainer.megatron.dist_checkpoint import save
    from agentrl.trainer.megatron.parallel import initialize, shutdown

    cpu.install()
    folder.mkdir(parents=True)
    layout = initialize(0, 1, f"file://{folder.parent}/meet", TrainerOptions())
    try:
        conversion = models.make_conversion(models.read_config(checkpoint), TrainerOptions(dtype="fp32"), layout)
        model = models.build_model(conversion)
        conversion.load([model], Path(checkpoint))
        if layer_freq is not None:
            conversion.config.moe_layer_freq = layer_freq
        state = {"model": model.sharded_state_dict(metadata=metadata), "args": Namespace(), **(beside or {})}
        save(state, folder)
    finally:
        shutdown()


def assert_equal_models(folder, original):
    here, there = (load_file(Path(path) / "model.safetensors") for path in (folder, original))
    assert here.keys() == there.keys()
    for name, tensor in there.items():
        assert here[name].dtype == tensor.dtype and torch.equal(here[name], tensor), name


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {"dtype": "bfloat16"}),
        ("qwen3", {"tie_word_embeddings": True}),
        ("glm4", {}),
        ("qwen2_moe", {}),
        ("glm4_moe", {"dtype": "bfloat16"}),
        ("deepseek_v3", {}),
    ],
)
def test_there_and_back_every_tensor_is_the_same(models, tmp_path, kind, changes, monkeypatch):
    from agentrl.trainer.megatron import dist_checkpoint

    monkeypatch.setattr(dist_checkpoint, "READ_BYTES", 100_000)  # several times
    original = models(kind, **changes)
    if kind == "glm4_moe":  # such layers are not Megatron's, and come back from the original
        original = copied(original, tmp_path)
        file = original / "model.safetensors"
        save_file({**load_file(file), **FURTHER}, file, {"format": "pt"})
    to_dist(original, tmp_path / "dist")
    to_hf(tmp_path / "dist", original, tmp_path / "back")
    assert_equal_models(tmp_path / "back", original)
    assert {file.name for file in (tmp_path / "back").iterdir()} == {file.name for file in original.iterdir()}


def test_tensors_are_called_and_lie_as_megatron_saves_them_with_transformer_engine(models, converted, tmp_path):
    layers, f32 = "decoder.layers.", torch.float32
    assert (converted / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert index_of(converted / "release") == {
        "embedding.word_embeddings.weight": ((512, 64), f32),
        layers + "self_attention.linear_qkv.layer_norm_weight": ((2, 64), f32),
        layers + "self_attention.linear_qkv.weight": ((2, 128, 64), f32),
        layers + "self_attention.q_layernorm.weight": ((2, 16), f32),
        layers + "self_attention.k_layernorm.weight": ((2, 16), f32),
        layers + "self_attention.linear_proj.weight": ((2, 64, 64), f32),
        layers + "mlp.linear_fc1.layer_norm_weight": ((2, 64), f32),
        layers + "mlp.linear_fc1.weight": ((2, 320, 64), f32),
        layers + "mlp.linear_fc2.weight": ((2, 64, 160), f32),
        "decoder.final_layernorm.weight": ((64,), f32),
        "output_layer.weight": ((512, 64), f32),
    }
    to_dist(models("deepseek_v3"), tmp_path / "dist")
    there = {key: shape for key, (shape, _) in index_of(tmp_path / "dist" / "release").items()}
    norms = {key.removeprefix(layers) for key in there if "norm" in key and key.startswith(layers)}
    latent = "self_attention.linear_q_up_proj.layer_norm_weight", "self_attention.linear_kv_up_proj.layer_norm_weight"
    assert norms == {
        *(f"{layer}.{name}" for layer in (0, 1) for name in ("input_layernorm.weight", *latent)),
        "0.mlp.linear_fc1.layer_norm_weight",
        "1.pre_mlp_layernorm.weight",  # experts follow
    }
    assert there[layers + "1.mlp.experts.experts.linear_fc1.weight"] == (8, 96, 64)
    to_dist(models("glm4"), tmp_path / "glm4")
    assert {layers + "post_self_attn_layernorm.weight", layers + "post_mlp_layernorm.weight"} <= index_of(
        tmp_path / "glm4" / "release"
    ).keys()


def test_megatron_loads_it_and_knows_the_model_that_it_is_of(converted, dense, make_trainer):
    from agentrl.trainer.megatron.dist_checkpoint import dist_checkpointing

    folder = str(converted / "release")
    model = make_trainer(str(dense)).policy.core.model
    expected = {name: value.clone() for name, value in model.named_parameters()}
    with torch.no_grad():
        for value in model.parameters():
            value.zero_()
    common = dist_checkpointing.load_common_state_dict(folder)
    metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common)
    loaded = dist_checkpointing.load({"model": model.sharded_state_dict(metadata=metadata)}, folder, strict="raise_all")
    model.load_state_dict(loaded["model"])
    assert all(torch.equal(value, expected[name]) for name, value in model.named_parameters())
    args = common["args"]
    assert (args.num_layers, args.hidden_size, args.num_query_groups, args.padded_vocab_size) == (2, 64, 2, 512)
    assert (args.tensor_model_parallel_size, args.pipeline_model_parallel_size) == (1, 1)
    assert args.untie_embeddings_and_output_weights and args.no_save_optim and common["checkpoint_version"] == 3.0


@pytest.mark.parametrize(
    ("kind", "metadata", "layer_freq"),
    [
        ("qwen3", {"singleton_local_shards": True}, None),
        ("qwen3", {"non_homogeneous_layers": True}, None),
        ("mixtral", {"singleton_local_shards": True}, None),
        ("mixtral", {}, 1),  # all layers are one tensor
        ("deepseek_v3", {}, None),
    ],
)
def test_each_way_in_which_megatron_lays_out_a_model_is_read(models, tmp_path, kind, metadata, layer_freq):
    original = models(kind)
    save_as_megatron(original, tmp_path / "dist" / "iter_0000042", metadata, layer_freq=layer_freq)
    (tmp_path / "dist" / "latest_checkpointed_iteration.txt").write_text("42\n")
    to_hf(tmp_path / "dist", original, tmp_path / "back")
    assert_equal_models(tmp_path / "back", original)


def test_of_a_training_checkpoint_the_model_is_read_and_a_padded_vocabulary_is_cut(
    dense, tmp_path, monkeypatch, capsys
):
    from agentrl.trainer.megatron.conversion import Conversion
    from agentrl.trainer.megatron.dist_checkpoint import ShardedObject, ShardedTensor

    key = "optimizer.state.exp_avg.decoder.final_layernorm.weight"
    beside = {
        "optimizer": {"moment": ShardedTensor.from_rank_offsets(key, torch.ones(64))},
        "rng_state": ShardedObject("rng_state", [OrderedDict()], (1,), (0,)),
    }
    with monkeypatch.context() as patched:
        patched.setattr(Conversion, "padded_vocab_size", 640)
        save_as_megatron(dense, tmp_path / "iter_0000001", beside=beside)
    assert index_of(tmp_path / "iter_0000001")["output_layer.weight"][0] == (640, 64)
    alone = tmp_path / "config alone"
    shutil.copytree(dense, alone, ignore=shutil.ignore_patterns("*.safetensors"))
    to_hf(tmp_path / "iter_0000001", alone, tmp_path / "back")
    assert "128 rows are left out" in capsys.readouterr().out
    assert_equal_models(tmp_path / "back", dense)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": 3}, r"decoder\.layers\.\S+ has the shape \[2, .*the model \[3, .* and \d+ more"),
        ({"intermediate_size": 128}, r"mlp\.linear_fc1\.weight has the shape \[2, 320, 64\], the model \[2, 256, 64\]"),
        ({"tie_word_embeddings": True}, r"it has output_layer\.weight, the model has not"),
        ({"vocab_size": 600}, r"embedding\.word_embeddings\.weight has the shape \[512, 64\], the model \[600, 64\]"),
        ({"kind": "qwen2"}, r"it has no decoder\.layers\.self_attention\.linear_qkv\.bias"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_by_tensor_and_shape(models, converted, tmp_path, changes, said):
    other = models(changes.pop("kind", "qwen3"), **changes)
    with pytest.raises(CheckpointError, match=said):
        to_hf(converted, other, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def _empty(folder):
    (folder / "release" / ".metadata").unlink()


def _names_code(folder):
    class Call:
        def __reduce__(self):
            return Path.touch, (folder / "ran",)

    (folder / "release" / ".metadata").write_bytes(pickle.dumps(Call()))


def _no_checkpoint_in_it(folder):
    shutil.rmtree(folder)
    folder.mkdir()


DAMAGE = {
    "nothing there": (_no_checkpoint_in_it, "is no distributed checkpoint .* it has no metadata.json, .metadata"),
    "not finished": (_empty, "or one that was not finished: it has no .metadata"),
    "another format": (
        lambda folder: (folder / "release" / "metadata.json").write_text('{"sharded_backend": "zarr"}'),
        "is in the format 'zarr'; only torch_dist can be read",
    ),
    "an older format": (
        lambda folder: (folder / "release" / "mp_rank_00").mkdir(),
        "older format .* --ckpt-convert-format torch_dist",
    ),
    "an iteration that is gone": (
        lambda folder: (folder / "latest_checkpointed_iteration.txt").write_text("7"),
        "names '7', and there is no folder iter_0000007; there are release",
    ),
    "a torn index": (
        lambda folder: (folder / "release" / ".metadata").write_bytes(b"\x80\x04junk"),
        ".metadata cannot be read, use another",
    ),
    "an index that runs code": (_names_code, "names pathlib.*, which is no part of one and might run code"),
    "a torn tensor": (
        lambda folder: (folder / "release" / "__0_0.distcp").write_bytes(b"torn"),
        "release cannot be read, use another checkpoint",
    ),
    "tensors that are gone": (
        lambda folder: (folder / "release" / "__0_0.distcp").unlink(),
        "release cannot be read, use another checkpoint: .*No such file",
    ),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_what_is_no_checkpoint_is_refused_with_the_reason(converted, dense, tmp_path, what):
    damage, said = DAMAGE[what]
    folder = copied(converted, tmp_path)
    damage(folder)
    with pytest.raises(CheckpointError, match=said):
        to_hf(folder, dense, tmp_path / "out")
    assert not (tmp_path / "out").exists() and not (folder / "ran").exists()


def test_a_full_disk_is_said_before_anything_is_written(dense, converted, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    for convert, source in ((to_dist, [dense]), (to_hf, [converted, dense])):
        with pytest.raises(StorageError, match=r"the model takes \S+ MiB, and 0.0 MiB are free in .*--output-dir"):
            convert(*source, tmp_path / "out")
        assert not list(tmp_path.iterdir())


def test_a_disk_that_refuses_leaves_nothing(dense, tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(StorageError, match="out: cannot be written: the disk is full, or refuses more"):
            to_dist(dense, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())


def test_the_command_converts_both_ways(dense, tmp_path, monkeypatch, capsys):
    from agentrl.cli import main as cli

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    dist, back = str(tmp_path / "dist"), str(tmp_path / "back")
    assert cli.main(["convert", "--hf-checkpoint", str(dense), "--output-dir", dist]) == 0
    assert cli.main(["convert", "--load", dist, "--hf-checkpoint", str(dense), "--output-dir", back]) == 0
    assert capsys.readouterr().out == f"wrote {dist}\nwrote {back}\n"
    assert_equal_models(back, dense)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "float32"


@pytest.mark.slow
def test_what_two_ranks_saved_is_put_together_and_what_one_wrote_is_split(models, tmp_path):
    """By Megatron, with its own writers."""
    from tests.trainer.ranks import DIST, run_dist
    from tests.trainer.test_layouts import spawn

    checkpoints = {kind: str(models(kind)) for kind, _ in DIST.values()}
    to_dist(checkpoints["qwen3"], tmp_path / "converted")
    spawn(run_dist, DIST, checkpoints, str(tmp_path))
    for name, (kind, _) in DIST.items():
        to_hf(tmp_path / name / "iter_0000003", checkpoints[kind], tmp_path / "back" / name)
        assert_equal_models(tmp_path / "back" / name, checkpoints[kind])
