"""Buckets, checksums and the process group of the trainer's end."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from agentrl.engines.control import Bucket
from agentrl.weights.checksums import Checksums, gpu_hash
from agentrl.weights.protocol import UNPREDICTED
from agentrl.weights.sender import WeightSender

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


def sender_of(tensors: dict[str, torch.Tensor], **options: Any) -> WeightSender:
    return WeightSender(lambda: iter(tensors.items()), **options)


def walk(sender: WeightSender) -> list[tuple[Bucket, dict[str, torch.Tensor]]]:
    """All buckets and copies of what they hold, without sending."""
    buckets, bucket = [], sender.start()
    while bucket is not None:
        buckets.append((bucket, {n: t.clone() for n, t in sender._current.named_tensors()}))
        bucket = sender.broadcast().next
    return buckets


def test_a_walk_holds_every_tensor_once_and_ends_with_the_last_bucket() -> None:
    tensors = parameters()
    buckets = walk(sender_of(tensors, bucket_bytes=1000))
    assert len(buckets) > 3
    assert [bucket.last for bucket, _ in buckets] == [False] * (len(buckets) - 1) + [True]
    received = {name: tensor for _, held in buckets for name, tensor in held.items()}
    assert list(received) == list(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(received[name], tensor)


def test_a_bucket_is_full_or_holds_one_large_tensor() -> None:
    buckets = walk(sender_of(parameters(), bucket_bytes=1000))
    for bucket, _ in buckets:
        assert bucket.nbytes <= 1000 or len(bucket.names) == 1


def test_mixed_dtypes_start_aligned() -> None:
    """SGLang refuses a tensor whose offset is not a multiple of its item size."""
    tensors = {
        "a": torch.ones(3, dtype=torch.bfloat16),
        "b": torch.full((2,), 2.0),
        "c": torch.tensor([3], dtype=torch.int8),
        "d": torch.full((4,), 4.0, dtype=torch.float16),
        "e": torch.tensor([5], dtype=torch.int64),
    }
    received = {}
    for bucket, held in walk(sender_of(tensors)):
        offset = 0
        for dtype, shape in zip(bucket.dtypes, bucket.shapes, strict=True):
            size = getattr(torch, dtype).itemsize
            assert offset % size == 0
            offset += size * torch.Size(shape).numel()
        assert offset == bucket.nbytes
        received |= held
    for name, tensor in tensors.items():
        assert received[name].dtype == tensor.dtype
        assert torch.equal(received[name], tensor)


def test_layout_is_that_of_sglangs_receiver() -> None:
    spec = importlib.util.find_spec("sglang")
    if spec is None:
        pytest.skip("sglang is not installed")
    path = Path(spec.submodule_search_locations[0]) / "srt/weight_sync/tensor_bucket.py"
    module_spec = importlib.util.spec_from_file_location("tensor_bucket", path)
    module = importlib.util.module_from_spec(module_spec)
    sys.modules["tensor_bucket"] = module
    module_spec.loader.exec_module(module)
    tensors = parameters()
    sender = sender_of(tensors)
    bucket = sender.start()
    received = module.FlattenedTensorBucket.empty(bucket.names, bucket.dtypes, bucket.shapes, "cpu")
    received.get_flattened_tensor().copy_(sender._current.flat)
    for name, tensor in received.reconstruct_tensors():
        assert torch.equal(tensor, tensors[name])


def test_cast_tied_head_and_empty_export() -> None:
    (bucket, held), *rest = walk(sender_of(parameters(), dtype=torch.bfloat16, tied_embeddings=True))
    assert rest == []
    assert set(bucket.dtypes) == {"bfloat16"}
    assert "lm_head.weight" not in bucket.names
    assert torch.equal(held["model.embed_tokens.weight"], parameters()["model.embed_tokens.weight"].bfloat16())
    assert sender_of({}).start() is None


def test_other_ranks_walk_in_lockstep_without_packing() -> None:
    tensors = parameters()
    seen: list[str] = []

    def export() -> Any:
        for name, tensor in tensors.items():
            seen.append(name)
            yield name, tensor

    first, second = sender_of(tensors, bucket_bytes=1000), WeightSender(export, bucket_bytes=1000, rank=1)
    assert second.listen() == 0
    assert second.connect({"g": 2}) == {}
    assert second.checksums() == []
    ours, theirs = first.start(), second.start()
    while ours is not None:
        assert theirs == ours
        ours, theirs = first.broadcast().next, second.broadcast().next
    assert theirs is None
    assert seen == list(tensors)
    assert all(buffer.numel() == 0 for buffer in second._buffers)


# Checksums. The oracle is written from SGLang's definition, the real comparison is in the engine tests.


def sha(*tensors: torch.Tensor, zeros: int = 0) -> str:
    data = b"".join(t.contiguous().view(torch.uint8).numpy().tobytes() for t in tensors)
    return hashlib.sha256(data + bytes(zeros)).hexdigest()[:16]


@pytest.mark.parametrize("bucket_bytes", [1, 1000, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checksums_are_fused_and_padded(bucket_bytes: int, dtype: torch.dtype) -> None:
    tensors = parameters(vocab=70, hidden=8, dtype=dtype)
    sender = sender_of(tensors, bucket_bytes=bucket_bytes)
    for _ in range(2):  # buffers are reused
        walk(sender)
        (checksums,) = sender.checksums()
        attention, mlp = f"{LAYER}.self_attn", f"{LAYER}.mlp"
        q, k, v = (tensors[f"{attention}.{p}_proj.weight"] for p in "qkv")
        assert checksums[f"{attention}.qkv_proj.weight"] == sha(q, k, v)
        gate, up = tensors[f"{mlp}.gate_proj.weight"], tensors[f"{mlp}.up_proj.weight"]
        assert checksums[f"{mlp}.gate_up_proj.weight"] == sha(gate, up)
        embedding = tensors["model.embed_tokens.weight"]
        padding = (128 - 70) * 8 * dtype.itemsize
        assert checksums["model.embed_tokens.weight"] == sha(embedding, zeros=padding)
        norm = f"{LAYER}.input_layernorm.weight"
        assert checksums[norm] == sha(tensors[norm])
        assert len(checksums) == 7


def test_checksums_of_tensor_parallel_ranks() -> None:
    tensors = parameters(vocab=128)
    sender = sender_of(tensors, tp=2, num_kv_heads=2)
    walk(sender)
    first, second = sender.checksums()
    q, k, v = (tensors[f"{LAYER}.self_attn.{p}_proj.weight"].chunk(2, 0) for p in "qkv")
    name = f"{LAYER}.self_attn.qkv_proj.weight"
    assert first[name] == sha(q[0], k[0], v[0])
    assert second[name] == sha(q[1], k[1], v[1])
    down = tensors[f"{LAYER}.mlp.down_proj.weight"].chunk(2, 1)
    assert second[f"{LAYER}.mlp.down_proj.weight"] == sha(down[1])
    norm = f"{LAYER}.input_layernorm.weight"
    assert first[norm] == second[norm]


def test_what_cannot_be_predicted_says_that_it_was_sent() -> None:
    """Key-value heads that are fewer than ranks are replicated; an unpadded vocabulary is cut elsewhere."""
    sender = sender_of(parameters(vocab=70), tp=2, num_kv_heads=1)
    walk(sender)
    for checksums in sender.checksums():
        assert checksums[f"{LAYER}.self_attn.qkv_proj.weight"] == UNPREDICTED
        assert checksums["model.embed_tokens.weight"] == UNPREDICTED
        assert checksums[f"{LAYER}.mlp.gate_up_proj.weight"]


def test_a_fused_parameter_of_which_a_part_is_missing_was_not_sent() -> None:
    tensors = parameters()
    del tensors[f"{LAYER}.self_attn.v_proj.weight"]
    sender = sender_of(tensors)
    walk(sender)
    assert f"{LAYER}.self_attn.qkv_proj.weight" not in sender.checksums()[0]


@pytest.mark.parametrize(
    ("n", "dtype", "expected"),
    [
        (1, torch.float32, 0x7BB542503BA9B944),
        (7, torch.bfloat16, 0xAEBD08A31FE265B1),
        (20000, torch.float32, 0x72F02542597407C7),
    ],
)
def test_gpu_hash_gives_what_sglangs_kernel_gave(n: int, dtype: torch.dtype, expected: int) -> None:
    tensor = (torch.arange(n) % 251 + 1).to(dtype)
    assert gpu_hash([tensor]) == expected
    assert gpu_hash(list(tensor.split(3000))) == expected


KERNEL = textwrap.dedent(
    """
    import sys, torch, triton, importlib.util
    spec = importlib.util.spec_from_file_location("kernel", sys.argv[1])
    kernel = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(kernel)
    from agentrl.weights.checksums import gpu_hash

    def reference(tensor, tile=8192, seed=0x243F6A88):
        data = tensor.view(torch.uint8)
        words = torch.nn.functional.pad(data, (0, -data.numel() % 4)).view(torch.uint32)
        sums = torch.empty(triton.cdiv(words.numel(), tile), dtype=torch.uint64)
        kernel.hash_tiles32_kernel_blocked[(sums.numel(),)](
            words, sums, words.numel(), seed1=seed, seed2=((seed * 0x9E3779B1) ^ 0xDEADBEEF) & 0xFFFFFFFF,
            FM_C1=kernel.FMIX32_C1, FM_C2=kernel.FMIX32_C2, POS_A=kernel.POS_C1, POS_B=kernel.POS_C2,
            TILE=tile, BLOCK=256, USE_CG=False)
        total = sum(sums.view(torch.int64).tolist()) % 2**64
        return kernel._final_splitmix64(total)

    for n, dtype in ((3, torch.bfloat16), (8193, torch.float32)):
        tensor = torch.randn(n).to(dtype)
        assert gpu_hash([tensor]) == reference(tensor), (n, dtype)
    print("equal")
    """
)


def test_gpu_hash_equals_sglangs_kernel() -> None:
    """The kernel itself, interpreted on the CPU."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or importlib.util.find_spec("triton") is None:
        pytest.skip("sglang or triton is not installed")
    path = Path(spec.submodule_search_locations[0]) / "kernels/ops/memory/gpu_tensor_hash.py"
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", KERNEL, str(path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=150)
    assert done.stdout.strip() == "equal", done.stderr[-2000:]


def test_clearing_forgets_half_a_fused_parameter() -> None:
    checksums = Checksums()
    checksums._add_tensor("m.q_proj.weight", torch.ones(2))
    checksums.clear()
    assert checksums._parts == {}


# The process group, with a receiver that does what SGLang's does.

RECEIVER = textwrap.dedent(
    """
    import sys
    from datetime import timedelta
    import torch, torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d
    port, names, sizes = int(sys.argv[1]), sys.argv[2], eval(sys.argv[3])
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20))
    pg, _ = c10d._new_process_group_helper(2, 1, [], c10d.Backend("gloo"), c10d.PrefixStore(names, store),
                                           group_name=names, timeout=timedelta(seconds=20))
    c10d._world.pg_group_ranks[pg] = {0: 0, 1: 1}
    total = 0
    for size in sizes:
        flat = torch.empty(size, dtype=torch.uint8)
        dist.broadcast(flat, src=0, group=pg)
        total += int(flat.long().sum())
    print(total, flush=True)
    """
)


def start_receiver(port: int, name: str, sizes: list[int]) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", RECEIVER, str(port), name, str(sizes)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def connect_all(sender: WeightSender, groups: dict[str, int], timeout: float = 30.0) -> dict[str, str]:
    deadline = time.monotonic() + timeout
    states: dict[str, str] = {}
    waiting = dict(groups)
    while waiting and time.monotonic() < deadline:
        states |= sender.connect(waiting, 10.0)
        waiting = {name: size for name, size in waiting.items() if states[name] == "waiting"}
    return states


def test_groups_do_not_touch_the_default_group_and_one_that_dies_costs_the_others_nothing() -> None:
    tensors = parameters()
    sender = sender_of(tensors, bucket_bytes=1000, timeout=10.0)
    sizes = [bucket.nbytes for bucket, _ in walk(sender)]
    expected = sum(int(t.view(torch.uint8).long().sum()) for t in tensors.values())
    port = sender.listen()
    whole, short = start_receiver(port, "whole", sizes), start_receiver(port, "short", sizes[:1])
    try:
        assert connect_all(sender, {"whole": 2, "short": 2}) == {"whole": "formed", "short": "formed"}
        assert not dist.is_initialized()
        bucket, failed = sender.start(), {}
        while bucket is not None:
            result = sender.broadcast()
            failed |= result.failed
            short.wait(timeout=20)
            bucket = result.next
        assert set(failed) == {"short"}
        assert whole.communicate(timeout=20)[0].strip() == str(expected)
    finally:
        sender.abort()
        for process in (whole, short):
            process.kill()
            process.wait()


def test_a_group_whose_engine_does_not_come_is_not_waited_for() -> None:
    sender = sender_of(parameters())
    sender.listen()
    started = time.monotonic()
    assert sender.connect({"nobody": 2}, 30.0) == {"nobody": "waiting"}
    assert time.monotonic() - started < 2.0
    sender.abort()


def test_the_rendezvous_listens_on_loopback_only() -> None:
    sender = sender_of(parameters())
    port = sender.listen("127.0.0.1")
    listening = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            address, state = line.split()[1], line.split()[3]
            if state == "0A" and address.endswith(f":{port:04X}"):
                listening.append(address)
    assert listening == [f"0100007F:{port:04X}"]
    sender.abort()


def test_disk_writes_whole_folders(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    tensors = parameters()
    sender = sender_of(tensors, bucket_bytes=1000)
    target = tmp_path / "version-1"
    total = sender.save(str(target))
    loaded = {n: t for file in sorted(target.glob("*.safetensors")) for n, t in load_file(file).items()}
    assert total == sum(t.numel() * 4 for t in tensors.values())
    assert set(loaded) == set(tensors)
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)
    assert not list(tmp_path.glob("*.partial"))
    assert len(sender.checksums()[0]) == 7


def test_calls_from_other_threads_leave_the_sender_usable() -> None:
    """Ray runs an actor's methods in whichever thread is free."""
    sender = sender_of(parameters())
    results: list[Any] = []
    for call in (sender.listen, sender.start, sender.broadcast, sender.checksums, sender.abort):
        thread = threading.Thread(target=lambda call=call: results.append(call()))
        thread.start()
        thread.join(10)
    assert len(results) == 5
