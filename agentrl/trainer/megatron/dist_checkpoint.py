"""Models between a Hugging Face folder and Megatron's distributed checkpoint (`megatron.core.dist_checkpointing`).

Which parameter lies where is what Megatron's own ``sharded_state_dict`` says of the model. So what was saved at any
parallel layout is read, and Megatron-LM and slime read at any what is written here. The model is described and never
built; one process does it, on the CPU, a part at a time on the way to Hugging Face and all at once on the way back.

The index of such a checkpoint is a pickle. Here it may name nothing but the parts of an index, so that nobody's
checkpoint runs code; ``common.pt``, which is one too, is not read.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import enum
import pickle
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed import checkpoint as torch_checkpoint
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from transformers import PretrainedConfig

from agentrl.config.schema import TrainerOptions
from agentrl.data.files import atomic_folder
from agentrl.data.writes import Writes
from agentrl.errors import CheckpointError, StorageError, first_few
from agentrl.families.family import rope, rotated_share
from agentrl.families.torch_dist import FORMAT, INDEX, RELEASE, TRACKER, open_folder
from agentrl.trainer.megatron import cpu

cpu.install()

from megatron.core import dist_checkpointing  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory  # noqa: E402
from megatron.core.dist_checkpointing.strategies import torch as torch_dist  # noqa: E402
from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy  # noqa: E402

from agentrl.trainer.megatron import model as models  # noqa: E402
from agentrl.trainer.megatron.conversion import tensor_files  # noqa: E402
from agentrl.trainer.megatron.export import in_parts, save_hf  # noqa: E402
from agentrl.trainer.megatron.parallel import Layout, initialize, shutdown  # noqa: E402

Say = Callable[[str], None]
Entry: TypeAlias = "ShardedTensor | ShardedTensorFactory"
Saved = dict[str, TensorStorageMetadata]
READ_BYTES = 1 << 30
"""About as much is read at a time."""
MOST_PADDING = 128 * 64
"""Rows that a vocabulary may have been padded with: Megatron makes it a multiple of 128 × the tensor-parallel size."""
LOOK_EVERY = 5.0
"""Seconds between two looks at how far a checkpoint is written."""
_OF_THE_MODEL = ("embedding.", "decoder.", "output_layer.")
_LAYER = re.compile(r"(decoder\.layers\.\d+\.)(.+)")
_STORED_LAYER = re.compile(r"decoder\.layers\.(?:\d+\.)?")
_WITH_A_NORM = "layer_norm_weight"


def to_dist(hf_checkpoint: Path, target: Path, say: Say) -> None:
    """Write the model of a Hugging Face folder as a checkpoint for Megatron-LM and slime: ``target/release``.

    Takes as much memory as the weights.

    Raises ConfigError, CheckpointError: the model is none that the trainer can take.
    Raises StorageError: the disk refuses; nothing is at ``target`` then."""
    hf_config = models.read_config(hf_checkpoint)
    size = sum(file.stat().st_size for file in set(tensor_files(hf_checkpoint).values()))
    check_space(target, size)
    with _described(hf_config) as model:
        mixture = model.conversion.config.num_moe_experts is not None
        metadata = {"non_homogeneous_layers": mixture, "singleton_local_shards": False}
        lies, objects = model.lies(metadata)
        state: dict[str, Any] = dict(objects)
        done = _Progress("read", size, say)
        for name, tensor in model.conversion.read(model.parameters, hf_checkpoint):
            parts = _parts(lies[name], model.keys(name, lies[name])[0], tensor)
            # Copies, as the writer would make of parts of a tensor, and keep the whole ones too.
            state[name] = [replace(part, data=part.data.clone()) for part in parts]
            done.add(tensor.nbytes)
        common = {"args": _arguments(model), "checkpoint_version": 3.0, "iteration": 0}
        with atomic_folder(target) as building, _written(building, size, say), _disk_errors(target):
            (building / RELEASE).mkdir()
            save({"model": state, **common}, building / RELEASE, metadata)
            (building / TRACKER).write_text(RELEASE)


def save(state: dict[str, Any], folder: Path, metadata: dict[str, bool] | None = None) -> None:
    """Megatron's ``dist_checkpointing.save``, by this process itself."""
    dist_checkpointing.save(state, str(folder), sharded_strategy=_Writer(FORMAT, 1), content_metadata=metadata)


def to_hf(source: Path, hf_checkpoint: Path, target: Path, say: Say) -> None:
    """Write the model of Megatron's checkpoint as a Hugging Face folder, in the dtype in which it was saved.

    Args:
        source: the checkpoint, or the folder that has it.
        hf_checkpoint: says the architecture; tokenizer and all but the weights are copied from there. So are layers
            that predict further tokens, where it has them: they are not trained.
        target: folder to make.

    Raises:
        CheckpointError: there is no checkpoint, it cannot be read, or is of another model.
        StorageError: the disk refuses; nothing is at ``target`` then.
    """
    folder = open_folder(source)
    hf_config = models.read_config(hf_checkpoint, weights=False)
    saved = read_index(folder)
    with _described(hf_config) as model:
        found = _find(model, saved, folder, say)
        size = sum(each.like.nbytes for each in found.values())
        check_space(target, size)
        has_weights = any(hf_checkpoint.glob("*.safetensors"))
        further = model.conversion.kept_aside(hf_checkpoint) if has_weights else iter(())
        done = _Progress("converted", size, say)
        save_hf(_load(model, found, folder, done), further, hf_checkpoint, target, Writes())


# -- what Megatron says of a model --------------------------------------------------------------------------


class _Model:
    """A model of one rank that takes no memory.

    Attributes:
        parameters: name in the whole model -> a tensor without content.
    """

    def __init__(self, hf_config: PretrainedConfig, layout: Layout):
        self.conversion = models.make_conversion(hf_config, TrainerOptions(dtype="fp32"), layout)
        with torch.device("meta"):
            self._model = models.build_model(self.conversion)
        self.parameters = self.conversion.tensors(self._model)

    def lies(self, metadata: dict[str, bool]) -> tuple[dict[str, Entry], dict[str, ShardedObject]]:
        """Where each parameter lies in a checkpoint, and what there is beside. Megatron's ``metadata`` says whether
        layers have a number in their names, or all are one tensor (``non_homogeneous_layers``), and whether experts and
        the halves of an MLP are tensors of their own (``singleton_local_shards``)."""
        if not (metadata["non_homogeneous_layers"] or metadata["singleton_local_shards"]):
            self.conversion.config.moe_layer_freq = 1  # with a list of layers it would number them all the same
        tensors: dict[str, Entry] = {}
        objects = {}
        for local, entry in self._model.sharded_state_dict(metadata=dict(metadata)).items():
            if isinstance(entry, ShardedObject):
                objects[local] = entry
            else:
                tensors[self.conversion.name(self._model, local)] = entry
        return tensors, objects

    def keys(self, name: str, entry: Entry) -> list[str]:
        """What a parameter may be called in a checkpoint, by Megatron with TransformerEngine first."""
        if not (found := _LAYER.fullmatch(name)):
            return [entry.key]
        layer, own = found.groups()
        sources = self.conversion.family.layer
        alike = [other for other, source in sources.items() if source == sources.get(own)]
        stored = _STORED_LAYER.match(entry.key)
        if len(alike) < 2 or stored is None:
            return [entry.key]

        def rank(other: str) -> int:
            """A norm is kept with the projection that follows it, where there is one and not several."""
            if not other.endswith(_WITH_A_NORM):
                return 1
            return 0 if layer + other.removesuffix(_WITH_A_NORM) + "weight" in self.parameters else 2

        return [stored[0] + other for other in sorted(alike, key=rank)]


@contextlib.contextmanager
def _described(hf_config: PretrainedConfig) -> Iterator[_Model]:
    """The model in a world of this process alone."""
    cpu.install()  # again: for what was imported here
    with tempfile.TemporaryDirectory(prefix="agentrl-convert-") as scratch:
        layout = initialize(0, 1, f"file://{scratch}/meet", TrainerOptions())
        try:
            yield _Model(hf_config, layout)
        finally:
            shutdown()


def _parts(entry: Entry, key: str, tensor: Tensor) -> list[ShardedTensor]:
    """A whole parameter as a checkpoint has it: one tensor, or the halves of an MLP's."""
    if isinstance(entry, ShardedTensorFactory):
        return replace(entry, key=key, data=tensor).build()
    return [replace(entry, key=key, data=tensor, dtype=tensor.dtype)]


def _arguments(model: _Model) -> argparse.Namespace:
    """What Megatron-LM asks of the arguments of the program that saved, and slime's tools of the model."""
    conversion, hf = model.conversion, model.conversion.hf_config.to_dict()
    plain = {
        field.name: value
        for field in dataclasses.fields(conversion.config)
        if isinstance(value := getattr(conversion.config, field.name), bool | int | float | str | list)
    }
    others = dict(
        num_experts=conversion.config.num_moe_experts,
        padded_vocab_size=conversion.padded_vocab_size,
        max_position_embeddings=hf["max_position_embeddings"],
        untie_embeddings_and_output_weights=not conversion.tied,
        swiglu=True,
        group_query_attention=True,
        position_embedding_type="rope",
        rotary_base=rope(hf)["rope_theta"],
        rotary_percent=rotated_share(hf),
        norm_epsilon=conversion.config.layernorm_epsilon,
        ckpt_format=FORMAT,
        world_size=1,
        data_parallel_size=1,
        no_save_optim=True,
        no_save_rng=True,
    )
    return argparse.Namespace(**(plain | others))


# -- reading ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Found:
    """A parameter in a checkpoint: Megatron's description, its key, and a tensor of its shape and dtype."""

    entry: Entry
    key: str
    like: Tensor


def _find(model: _Model, saved: Saved, folder: Path, say: Say) -> dict[str, _Found]:
    """Each parameter of the model. Raises CheckpointError where one is not there, has another shape, or is too much."""
    numbered = any(re.match(r"decoder\.layers\.\d", key) for key in saved)
    halves = any(key.endswith("linear_fc1.weight_w") for key in saved)
    lies, _ = model.lies({"non_homogeneous_layers": numbered, "singleton_local_shards": halves})
    found: dict[str, _Found] = {}
    missing: list[str] = []
    shapes: list[str] = []
    used: set[str] = set()
    for name, like in model.parameters.items():
        keys = model.keys(name, lies[name])
        for key in keys:
            parts = _parts(lies[name], key, like.to("meta"))
            if all(part.key in saved for part in parts):
                break
        else:
            missing.append(keys[0])
            continue
        used |= {part.key for part in parts}
        shapes += [
            f"{part.key} has the shape {list(saved[part.key].size)}, the model {list(part.global_shape)}"
            for part in parts
            if not _fits(part, saved[part.key])
        ]
        dtype = saved[parts[0].key].properties.dtype
        found[name] = _Found(lies[name], key, torch.empty_like(like, device="meta", dtype=dtype))
    unused = [key for key in saved if key.startswith(_OF_THE_MODEL) and key not in used and "_extra_state" not in key]
    problems = list(dict.fromkeys(shapes))
    if missing:
        problems.append(f"it has no {first_few(dict.fromkeys(missing))}")
    if unused:
        problems.append(f"it has {first_few(sorted(unused))}, the model has not")
    if problems:
        raise CheckpointError(f"{folder} is not of the model that config.json describes: {first_few(problems)}")
    vocabulary = found["embedding.word_embeddings.weight"]
    if padding := saved[vocabulary.key].size[0] - len(vocabulary.like):
        say(f"the vocabulary was padded: {padding} rows are left out")
    return found


def _fits(part: ShardedTensor, stored: TensorStorageMetadata) -> bool:
    wanted, there = tuple(part.global_shape), tuple(stored.size)
    if not part.allow_shape_mismatch or len(wanted) != len(there):
        return wanted == there
    return wanted[1:] == there[1:] and 0 <= there[0] - wanted[0] < MOST_PADDING


def _load(model: _Model, found: dict[str, _Found], folder: Path, done: _Progress) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor, as Hugging Face has them, of all parameters; some are in memory at a time."""
    for names in in_parts(found, lambda name: found[name].like.nbytes, READ_BYTES):
        tensors = {name: torch.empty_like(found[name].like, device="cpu") for name in names}
        wanted = {
            f"{name}/{n}": _a_part_alone(part)
            for name, tensor in tensors.items()
            for n, part in enumerate(_parts(found[name].entry, found[name].key, tensor))
        }
        try:
            torch_dist.TorchDistLoadShardedStrategy().load(wanted, folder)  # into the tensors
        except (Exception, CheckpointException) as error:
            reason = str(error).strip().splitlines()[-1]
            raise CheckpointError(f"{folder} cannot be read, use another checkpoint: {reason}") from error
        for name, tensor in tensors.items():
            yield from model.conversion.to_hf(name, tensor)
            done.add(tensor.nbytes)


def _a_part_alone(part: ShardedTensor) -> ShardedTensor:
    """The same part with the axes of layer and expert as axes of its own, so that others need not be asked for too."""
    axes = part.prepend_axis_num
    data = part.data.view((1,) * axes + part.local_shape)
    return replace(part, data=data, local_shape=tuple(data.shape), prepend_axis_num=0)


def read_index(folder: Path) -> Saved:
    """Shape and dtype of each tensor of a distributed checkpoint.
    Raises CheckpointError: the index cannot be read, or names what would run code."""
    try:
        with (folder / INDEX).open("rb") as stream:
            index = _Index(stream).load()
        if not isinstance(index, Metadata):
            raise TypeError(f"it holds {type(index).__name__}")
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{folder / INDEX} cannot be read, use another checkpoint: {error!r}") from error
    return {k: v for k, v in index.state_dict_metadata.items() if isinstance(v, TensorStorageMetadata)}


class _Index(pickle.Unpickler):
    """Reads an index, and makes no object but those that Megatron and torch put into one."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _NAMED.get(module, ()):
            return super().find_class(module, name)
        if "." not in name and module.startswith(_RECORDS) and _is_record(found := super().find_class(module, name)):
            return found
        raise CheckpointError(
            f"the index of this checkpoint names {module}.{name}, which is no part of one and might run code: it was "
            "not read"
        )


_RECORDS = ("torch.distributed.checkpoint.", "torch.distributed._shard.", "megatron.core.dist_checkpointing.")
_NAMED = {
    "torch": {"Size", "device", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "builtins": {"set", "frozenset", "slice"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
}


def _is_record(found: Any) -> bool:
    """Whether it is a dataclass or an enumeration of those packages, or Megatron's stand-in for one: made, they do
    nothing."""
    return (
        isinstance(found, type)
        and found.__module__.startswith(_RECORDS)
        and (dataclasses.is_dataclass(found) or issubclass(found, enum.Enum) or found.__init__ is object.__init__)
    )


class _Writer(SaveShardedStrategy):
    """Megatron's own writes the same from processes that it forks, and waits for ever for one that was killed."""

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
        state, _, _ = torch_dist._replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        torch_checkpoint.save(
            torch_dist.mcore_to_pyt_state_dict(state),
            storage_writer=torch_checkpoint.FileSystemWriter(checkpoint_dir),  # of its threads nobody hears an error
            planner=torch_dist.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )


# -- the disk -----------------------------------------------------------------------------------------------


def check_space(target: Path, size: int) -> None:
    """Raises StorageError where ``size`` bytes have no room beside ``target``."""
    there = next(folder for folder in target.absolute().parents if folder.is_dir())
    free = shutil.disk_usage(there).free
    if free < size:
        raise StorageError(
            f"{target}: the model takes {_size(size)}, and {_size(free)} are free in {there}. Free some space, or "
            "give another --output-dir"
        )


@contextlib.contextmanager
def _disk_errors(target: Path) -> Iterator[None]:
    """What the disk refuses is an OSError, though torch wraps it in errors of its own, or only finds the file short."""
    try:
        yield
    except (Exception, CheckpointException) as error:
        if "unexpected pos" in str(error):
            raise StorageError(f"{target}: cannot be written: the disk is full, or refuses more") from error
        raise _os_error(error) or error from error


def _os_error(error: BaseException | None) -> OSError | None:
    if error is None or isinstance(error, OSError):
        return error
    failures = error.failures.values() if isinstance(error, CheckpointException) else ()
    inner = (error.__cause__, error.__context__, *(failure for failure, _ in failures))
    return next((found for each in inner if (found := _os_error(each))), None)


def _size(count: int) -> str:
    return f"{count / (1 << 30):.2f} GiB" if count >= 1 << 27 else f"{count / (1 << 20):.1f} MiB"


class _Progress:
    """Says how far it is, once a GiB."""

    def __init__(self, what: str, total: int, say: Say):
        self._what, self._total, self._say = what, total, say
        self._done = self._said = 0

    def add(self, size: int) -> None:
        self.reached(self._done + size)

    def reached(self, done: int) -> None:
        self._done = done
        if done - self._said >= 1 << 30:
            self._said = done
            self._say(f"{self._what} {_size(done)} of {_size(self._total)}")


@contextlib.contextmanager
def _written(folder: Path, total: int, say: Say) -> Iterator[None]:
    """Says now and then how much of a folder is written."""
    over, written = threading.Event(), _Progress("wrote", total, say)

    def watch() -> None:
        while not over.wait(LOOK_EVERY):
            with contextlib.suppress(OSError):
                written.reached(sum(file.stat().st_size for file in folder.rglob("*")))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
