"""A model's part of a checkpoint: weights, optimizer, scheduler, random state. No pickle.

::

    trainer/policy/
      state.json                     layout it was saved under, counters, scheduler
      model-tp0-pp0.safetensors      one file a tensor- and pipeline-parallel rank:
                                     weight/<name>, exp_avg/<name>, exp_avg_sq/<name>
      experts-ep0-pp0.safetensors    the same of experts, where they are spread over ranks
      random-00000.safetensors       random states, one file a rank

Weights are the optimizer's float32 ones. Names are Megatron's with the number of the layer in the whole
model, so pipeline stages can be cut anew on loading, and experts and tensor-parallel parts be dealt anew.
So a checkpoint saved at one layout loads at another. At the same layout, a resumed run
is bit-identical to one that was not interrupted.

Megatron's own distributed checkpoints are for other programs (`dist_checkpoint.py`): their index is a pickle.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from safetensors import SafetensorError, safe_open
from torch import Tensor

from agentrl.data.checkpoint import read_json
from agentrl.data.files import write_json
from agentrl.data.tensor_file import save_tensors
from agentrl.data.writes import Writes
from agentrl.errors import CheckpointError
from agentrl.trainer.megatron import cpu
from agentrl.trainer.megatron.conversion import Conversion, is_split
from agentrl.trainer.megatron.model import PolicyModel
from agentrl.trainer.megatron.parallel import Layout

FORMAT = 1
MOMENTS = ("exp_avg", "exp_avg_sq")
_EMBEDDINGS = ("embedding.word_embeddings.weight", "output_layer.weight")


class ModelState:
    """Saves and loads what a rank holds. Collective."""

    def __init__(
        self,
        chunks: Iterable[PolicyModel],
        conversion: Conversion,
        optimizer: MegatronOptimizer,
        scheduler: OptimizerParamScheduler,
        layout: Layout,
    ):
        self._conversion, self._scheduler, self._layout = conversion, scheduler, layout
        # Experts that are spread over ranks have an optimizer of their own.
        self._optimizers = getattr(optimizer, "chained_optimizers", [optimizer])
        self._parameters = {conversion.name(part, local): p for part in chunks for local, p in part.named_parameters()}

    def save(self, folder: Path, counters: dict[str, int], writes: Writes, *, moments: bool = True) -> None:
        """Write copies of this rank's state into ``folder``, which exists or is made, without ``moments`` as of an
        optimizer that has made no step. Ends with a barrier."""
        folder.mkdir(parents=True, exist_ok=True)
        layout = self._layout
        steps = self._steps() if moments else 0
        tensors: dict[str, Tensor] = {}
        experts: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            spread = self._conversion.spread(name)
            file, mine = (experts, layout.edp_rank == 0) if spread else (tensors, layout.dp_rank == 0)
            # Collective with the distributed optimizer, so on all data-parallel ranks; kept by the one that writes.
            for kind, value in self._values(parameter, steps).items():
                if mine:
                    file[f"{kind}/{name}"] = value.detach().to("cpu", copy=True).contiguous()
        if layout.dp_rank == 0:
            file_name = f"model-tp{layout.tp_rank}-pp{layout.pp_rank}.safetensors"
            writes(partial(save_tensors, tensors), folder / file_name)
        if layout.ep > 1 and layout.edp_rank == 0:  # also of a stage without experts: it is known by its number
            file_name = f"experts-ep{layout.ep_rank}-pp{layout.pp_rank}.safetensors"
            writes(partial(save_tensors, experts), folder / file_name)
        writes(partial(save_tensors, _random_states()), folder / f"random-{layout.rank:05d}.safetensors")
        if layout.rank == 0:
            sizes = {"tp": layout.tp, "pp": layout.pp, "dp": layout.dp, "ep": layout.ep}
            sizes["world_size"] = layout.world_size
            state = {
                "format": FORMAT,
                "layout": sizes,
                "counters": counters,
                "optimizer_steps": steps,
                "scheduler_steps": self._scheduler.num_steps,
            }
            writes(partial(write_json, value=state), folder / "state.json")
        dist.barrier()

    def load(self, folder: Path, *, moments: bool = True) -> dict[str, int]:
        """Set weights, moments where asked for and there, schedule and random state from ``folder``; returns the
        counters.

        The learning-rate schedule itself is that of the present options; its position is the saved one.
        Raises CheckpointError: files are missing or do not fit this model."""
        state = read_json(folder / "state.json")
        if state.get("format") != FORMAT:
            raise CheckpointError(f"{folder}: format {state.get('format')}, expected {FORMAT}")
        saved = _SavedTensors(folder, state["layout"], self._conversion)
        steps = state["optimizer_steps"] if moments else 0
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                kinds = ("weight", *MOMENTS) if steps else ("weight",)
                self._set(parameter, {kind: saved.local(kind, name, parameter) for kind in kinds}, steps)
        self._scheduler.num_steps = state["scheduler_steps"]
        self._scheduler.step(0)
        if state["layout"]["world_size"] == self._layout.world_size:
            _set_random_states(folder / f"random-{self._layout.rank:05d}.safetensors")
        dist.barrier()
        return state["counters"]

    # -- the three kinds of optimizers ------------------------------------------------------------

    def _optimizer_of(self, parameter: torch.nn.Parameter) -> MegatronOptimizer:
        if len(self._optimizers) == 1:
            return self._optimizers[0]
        # Megatron deals parameters by this mark of theirs: those of spread experts are not summed over all replicas.
        return self._optimizers[0] if getattr(parameter, "allreduce", True) else self._optimizers[1]

    def _values(self, parameter: torch.nn.Parameter, steps: int) -> dict[str, Tensor]:
        """float32 weight and moments, each of the shape of the (local) parameter."""
        optimizer = self._optimizer_of(parameter)
        if isinstance(optimizer, DistributedOptimizer):
            return self._gathered(optimizer, parameter, steps)
        main = getattr(parameter, "main_param", parameter)
        state = optimizer.optimizer.state.get(main, {})
        return {"weight": main, **{k: state[k] for k in MOMENTS if k in state and steps}}

    def _gathered(
        self, optimizer: DistributedOptimizer, parameter: torch.nn.Parameter, steps: int
    ) -> dict[str, Tensor]:
        """The same, put together from the slices of the data-parallel ranks."""
        mine = _slice_of(optimizer, parameter)
        parts = optimizer._get_main_param_and_optimizer_states(parameter) if mine else {}
        kinds = {"weight": "param"} | ({k: k for k in MOMENTS} if steps else {})
        values = {}
        for kind, key in kinds.items():
            whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
            if mine:
                whole[mine] = parts[key].detach().float()
            dist.all_reduce(whole, group=optimizer.data_parallel_group)
            values[kind] = whole.view(parameter.shape)
        return values

    def _set(self, parameter: torch.nn.Parameter, values: dict[str, Tensor], steps: int) -> None:
        optimizer = self._optimizer_of(parameter)
        parameter.copy_(values["weight"])
        if isinstance(optimizer, DistributedOptimizer):
            mine = _slice_of(optimizer, parameter)
            if not mine:
                return
            group, order = optimizer.model_param_group_index_map[parameter]
            main = optimizer.optimizer.param_groups[group]["params"][order]
            values = {kind: value.reshape(-1)[mine] for kind, value in values.items()}
        else:
            main = getattr(parameter, "main_param", parameter)
        main.copy_(values["weight"])
        if not steps:
            return
        state = optimizer.optimizer.state[main]
        for kind in MOMENTS:
            state[kind] = values[kind].to(main.device, torch.float32, copy=True)
        # torch's Adam counts steps per parameter, TransformerEngine's per group.
        if type(optimizer.optimizer).__module__.startswith("torch."):
            state["step"] = torch.tensor(float(steps))
        else:
            for group in optimizer.optimizer.param_groups:
                group["step"] = steps

    def _steps(self) -> int:
        """Updates Adam has made. The same on all ranks, also on one that owns no slice."""
        inner = [part.optimizer for part in self._optimizers]
        counts = [count for part in inner for count in (*part.param_groups, *part.state.values())]
        mine = max((int(c["step"]) for c in counts if "step" in c), default=0)
        steps = torch.tensor(mine, device=next(iter(self._parameters.values())).device)
        dist.all_reduce(steps, op=dist.ReduceOp.MAX)
        return int(steps)


def _slice_of(optimizer: DistributedOptimizer, parameter: torch.nn.Parameter) -> slice | None:
    """The part of a flattened parameter that this data-parallel rank's optimizer owns."""
    if parameter not in optimizer.model_param_gbuf_map:
        return None
    index, dtype, bucket = optimizer.model_param_gbuf_map[parameter]
    ranges = optimizer.gbuf_ranges[index][dtype][bucket]["param_map"].get(parameter)
    return slice(ranges["param"].start, ranges["param"].end) if ranges else None


class _SavedTensors:
    """Tensors of a saved folder, cut as this rank needs them."""

    def __init__(self, folder: Path, saved: dict[str, int], conversion: Conversion):
        self._conversion = conversion
        self._files: dict[str, list[Any]] = {}
        """Key -> the files that have it, or its tensor-parallel parts in order."""
        for stage in range(saved["pp"]):
            parts = [self._open(folder / f"model-tp{part}-pp{stage}.safetensors") for part in range(saved["tp"])]
            spread = saved.get("ep", 1)
            files = [folder / f"experts-ep{part}-pp{stage}.safetensors" for part in range(spread if spread > 1 else 0)]
            for group in (parts, *([self._open(file)] for file in files)):
                for key in group[0].keys():  # noqa: SIM118
                    self._files.setdefault(key, group)

    @staticmethod
    def _open(path: Path) -> Any:
        try:
            return safe_open(path, framework="pt", device="cpu")
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} cannot be read ({error}); use another checkpoint") from error

    def local(self, kind: str, name: str, parameter: Tensor) -> Tensor:
        """This rank's part of a tensor that is laid out like ``parameter``."""
        key = f"{kind}/{name}"
        if key not in self._files and name == "output_layer.weight":
            # Saved in one stage, loaded in several: the tied head is a copy of the embedding.
            key = f"{kind}/embedding.word_embeddings.weight"
        if key not in self._files:
            raise CheckpointError(f"the checkpoint has no {key!r}; it is of another model")
        parts = [file.get_tensor(key) for file in self._files[key]]
        whole = parts[0]
        if is_split(parameter):
            whole = self._conversion.merge(name, parts, vars(parameter)["partition_dim"])
        if name in _EMBEDDINGS:
            whole = self._conversion.padded(whole)
        value = self._conversion.split(name, whole, parameter)
        if value.shape != parameter.shape:
            raise CheckpointError(
                f"the checkpoint's {key!r} has shape {tuple(value.shape)}, this model's {tuple(parameter.shape)}; "
                "it is of another model"
            )
        return value


def _random_states() -> dict[str, Tensor]:
    """Copies of the states of this rank's generators."""
    states = {"cpu": torch.get_rng_state()}
    if not cpu.on_cpu():
        states["cuda"] = torch.cuda.get_rng_state()
    for name, state in get_cuda_rng_tracker().get_states().items():
        states[f"tracker/{name}"] = state.clone()
    return states


def _set_random_states(path: Path) -> None:
    with safe_open(path, framework="pt", device="cpu") as file:
        states = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    torch.set_rng_state(states.pop("cpu"))
    cuda = states.pop("cuda", None)
    if cuda is not None and not cpu.on_cpu():
        torch.cuda.set_rng_state(cuda)
    get_cuda_rng_tracker().set_states({k.removeprefix("tracker/"): v for k, v in states.items()})
