"""What is published: files whose bytes are the buckets of a broadcast."""

from __future__ import annotations

import errno
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from agentrl.errors import StorageError, WeightSyncError
from agentrl.weights.publisher import Publisher

LAYER = "model.layers.0"


def parameters(vocab: int = 70, hidden: int = 8, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    shapes = {
        "model.embed_tokens.weight": (vocab, hidden),
        f"{LAYER}.self_attn.q_proj.weight": (16, hidden),
        f"{LAYER}.self_attn.k_proj.weight": (8, hidden),
        f"{LAYER}.self_attn.v_proj.weight": (8, hidden),
        f"{LAYER}.self_attn.o_proj.weight": (hidden, 16),
        f"{LAYER}.mlp.gate_proj.weight": (12, hidden),
        f"{LAYER}.mlp.up_proj.weight": (12, hidden),
        f"{LAYER}.mlp.down_proj.weight": (hidden, 12),
        f"{LAYER}.input_layernorm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    return {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}


def publisher_of(tensors: dict[str, torch.Tensor], folder: Path, **options: Any) -> Publisher:
    return Publisher(lambda: iter(tensors.items()), folder, **options)


def loaded(folder: str) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(Path(folder).iterdir()) for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_files_hold_every_tensor_and_buckets_are_full_or_of_one_tensor(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = parameters(dtype=dtype)
    snapshot = publisher_of(tensors, tmp_path, bucket_bytes=1000).publish(3)
    assert (snapshot.version, snapshot.nbytes) == (3, sum(t.nbytes for t in tensors.values()))
    assert len(snapshot.buckets) > 3 and all(b.nbytes <= 1000 or len(b.names) == 1 for b in snapshot.buckets)
    assert [name for bucket in snapshot.buckets for name in bucket.names] == list(tensors)
    held = loaded(snapshot.folder)
    assert set(held) == set(tensors)
    assert all(torch.equal(held[name], tensors[name]) for name in tensors)


def test_mixed_dtypes_start_aligned(tmp_path: Path) -> None:
    """SGLang refuses a tensor whose offset is not a multiple of its item size."""
    tensors = {
        "a": torch.ones(3, dtype=torch.bfloat16),
        "b": torch.full((2,), 2.0),
        "c": torch.tensor([3], dtype=torch.int8),
        "d": torch.full((4,), 4.0, dtype=torch.float16),
        "e": torch.tensor([5], dtype=torch.int64),
    }
    snapshot = publisher_of(tensors, tmp_path).publish(0)
    for bucket in snapshot.buckets:
        offset = 0
        for dtype, shape in zip(bucket.dtypes, bucket.shapes, strict=True):
            size = getattr(torch, dtype).itemsize
            assert offset % size == 0
            offset += size * torch.Size(shape).numel()
        assert offset == bucket.nbytes
    held = loaded(snapshot.folder)
    assert all(torch.equal(held[name], tensors[name]) and held[name].dtype == tensors[name].dtype for name in tensors)


def test_layout_is_that_of_sglangs_receiver(tmp_path: Path) -> None:
    spec = importlib.util.find_spec("sglang")
    if spec is None:
        pytest.skip("sglang is not installed")
    path = Path(spec.submodule_search_locations[0]) / "srt/weight_sync/tensor_bucket.py"
    module_spec = importlib.util.spec_from_file_location("tensor_bucket", path)
    module = importlib.util.module_from_spec(module_spec)
    sys.modules["tensor_bucket"] = module
    module_spec.loader.exec_module(module)
    tensors = parameters()
    publisher = publisher_of(tensors, tmp_path)
    (bucket,) = publisher.publish(0).buckets
    received = module.FlattenedTensorBucket.empty(bucket.names, bucket.dtypes, bucket.shapes, "cpu")
    received.get_flattened_tensor().copy_(publisher.flat(0))
    for name, tensor in received.reconstruct_tensors():
        assert torch.equal(tensor, tensors[name])


def test_a_version_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    """One copy at a time; who reads the one before can go on. The digest differs where the weights do."""
    tensors = parameters()
    publisher = publisher_of(tensors, tmp_path, tied_embeddings=True)
    first = publisher.publish(1)
    reading = publisher.flat(0)
    again = publisher.publish(2)
    assert not first.is_there() and again.is_there() and "lm_head.weight" not in again.buckets[0].names
    assert torch.equal(reading, publisher.flat(0)) and first.digest == again.digest
    tensors[f"{LAYER}.input_layernorm.weight"][0] += 1e-3
    third = publisher.publish(3)
    assert third.digest != again.digest
    assert [p.name for p in tmp_path.iterdir()] == ["version-000003"]
    publisher.remove()
    assert list(tmp_path.iterdir()) == []


def test_other_ranks_walk_in_lockstep_and_write_nothing(tmp_path: Path) -> None:
    tensors, seen = parameters(), []

    def export() -> Any:
        for name, tensor in tensors.items():
            seen.append(name)
            yield name, tensor

    other = Publisher(export, tmp_path, rank=1)
    assert other.publish(0) is None
    assert seen == 2 * list(tensors), "once for the layout, once for the version"
    assert list(tmp_path.iterdir()) == []


def test_no_room_is_said_and_the_walk_still_comes_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, seen = parameters(), []

    def export() -> Any:
        for name, tensor in tensors.items():
            seen.append(name)
            yield name, tensor

    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(StorageError, match="No space left on device.*give --weight-snapshot-dir"):
        Publisher(export, tmp_path).publish(5)
    assert seen == 2 * list(tensors), "or the other ranks would wait for ever"
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(WeightSyncError, match="exported no weights"):
        publisher_of({}, tmp_path).publish(0)
