"""A model's part of a checkpoint: weights, optimizer, scheduler, random state. No pickle.

::

    trainer/policy/
      state.json                     layout it was saved under, counters, scheduler
      model-tp0-pp0.safetensors      one file a tensor- and pipeline-parallel rank:
                                     weight/<name>, exp_avg/<name>, exp_avg_sq/<name>
      random-00000.safetensors       random states, one file a rank

Weights are the optimizer's float32 ones. Names are Megatron's with the number of the layer in the whole
model, so pipeline stages can be cut anew on loading; tensor-parallel parts are joined and split by
mbridge. So a checkpoint saved at one layout loads at another. At the same layout, a resumed run
is bit-identical to one that was not interrupted.

Megatron's own distributed checkpoints are not used: torch's format behind them reads its index by unpickling.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mbridge.core.bridge import Bridge
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from safetensors import SafetensorError, safe_open
from torch import Tensor

from agentrl.data.checkpoint import read_json
from agentrl.data.files import write_json
from agentrl.data.tensor_file import save_tensors
from agentrl.errors import CheckpointError
from agentrl.trainer.megatron import cpu
from agentrl.trainer.megatron.model import PolicyModel
from agentrl.trainer.megatron.parallel import Layout

FORMAT = 1
MOMENTS = ("exp_avg", "exp_avg_sq")
_EMBEDDINGS = ("embedding.word_embeddings.weight", "output_layer.weight")


class ModelState:
    """Saves and loads what a rank holds. Collective.

    Args:
        model, bridge, optimizer, scheduler: of this rank.
        layout: where this rank stands.
    """

    def __init__(
        self,
        model: PolicyModel,
        bridge: Bridge,
        optimizer: MegatronOptimizer,
        scheduler: OptimizerParamScheduler,
        layout: Layout,
    ):
        self._bridge, self._scheduler, self._layout = bridge, scheduler, layout
        self._optimizers = getattr(optimizer, "chained_optimizers", [optimizer])
        names = bridge._weight_name_mapping_mcore_local_to_global(model)
        self._parameters = {names[local]: p for local, p in model.named_parameters()}

    def save(self, folder: Path, counters: dict[str, int]) -> None:
        """Write this rank's files into ``folder``, which exists or is made. Ends with a barrier."""
        folder.mkdir(parents=True, exist_ok=True)
        layout = self._layout
        steps = self._steps()
        tensors: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            # Collective with the distributed optimizer, so on all data-parallel ranks.
            for kind, value in self._values(parameter, steps).items():
                tensors[f"{kind}/{name}"] = value.detach().to("cpu", copy=True).contiguous()
        if layout.dp_rank == 0:
            save_tensors(tensors, folder / f"model-tp{layout.tp_rank}-pp{layout.pp_rank}.safetensors")
        save_tensors(_random_states(), folder / f"random-{layout.rank:05d}.safetensors")
        if layout.rank == 0:
            sizes = {"tp": layout.tp, "pp": layout.pp, "dp": layout.dp, "world_size": layout.world_size}
            state = {
                "format": FORMAT,
                "layout": sizes,
                "counters": counters,
                "optimizer_steps": steps,
                "scheduler_steps": self._scheduler.num_steps,
            }
            write_json(folder / "state.json", state)
        _barrier(layout)

    def load(self, folder: Path) -> dict[str, int]:
        """Set weights, moments, schedule and random state from ``folder``; returns the counters.

        The learning-rate schedule itself is that of the present options; its position is the saved one.

        Raises:
            CheckpointError: files are missing or do not fit this model.
        """
        state = read_json(folder / "state.json")
        if state.get("format") != FORMAT:
            raise CheckpointError(f"{folder}: format {state.get('format')}, expected {FORMAT}")
        saved = _SavedTensors(folder, state["layout"], self._bridge, self._layout)
        steps = state["optimizer_steps"]
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                kinds = ("weight", *MOMENTS) if steps else ("weight",)
                self._set(parameter, {kind: saved.local(kind, name, parameter) for kind in kinds}, steps)
        self._scheduler.num_steps = state["scheduler_steps"]
        self._scheduler.step(0)
        if state["layout"]["world_size"] == self._layout.world_size:
            _set_random_states(folder / f"random-{self._layout.rank:05d}.safetensors")
        _barrier(self._layout)
        return state["counters"]

    # -- the three kinds of optimizers ------------------------------------------------------------

    def _values(self, parameter: torch.nn.Parameter, steps: int) -> dict[str, Tensor]:
        """float32 weight and moments, each of the shape of the (local) parameter."""
        optimizer = self._optimizers[0]
        if isinstance(optimizer, DistributedOptimizer):
            return self._gathered(optimizer, parameter, steps)
        main = getattr(parameter, "main_param", parameter)
        state = optimizer.optimizer.state.get(main, {})
        return {"weight": main, **{k: state[k] for k in MOMENTS if k in state}}

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
        optimizer = self._optimizers[0]
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
        if _step_in_state(optimizer):
            state["step"] = torch.tensor(float(steps))
        else:
            for group in optimizer.optimizer.param_groups:
                group["step"] = steps

    def _steps(self) -> int:
        """Updates Adam has made. The same on all ranks, also on one that owns no slice."""
        optimizer = self._optimizers[0].optimizer
        counts = [*optimizer.param_groups, *optimizer.state.values()]
        mine = max((int(c["step"]) for c in counts if "step" in c), default=0)
        steps = torch.tensor(mine, device=next(iter(self._parameters.values())).device)
        dist.all_reduce(steps, op=dist.ReduceOp.MAX)
        return int(steps)


def _step_in_state(optimizer: MegatronOptimizer) -> bool:
    """torch's Adam counts steps per parameter, TransformerEngine's per group."""
    return type(optimizer.optimizer).__module__.startswith("torch.")


def _slice_of(optimizer: DistributedOptimizer, parameter: torch.nn.Parameter) -> slice | None:
    """The part of a flattened parameter that this data-parallel rank's optimizer owns."""
    if parameter not in optimizer.model_param_gbuf_map:
        return None
    index, dtype, bucket = optimizer.model_param_gbuf_map[parameter]
    ranges = optimizer.gbuf_ranges[index][dtype][bucket]["param_map"].get(parameter)
    return slice(ranges["param"].start, ranges["param"].end) if ranges else None


class _SavedTensors:
    """Tensors of a saved folder, cut as this rank needs them."""

    def __init__(self, folder: Path, saved: dict[str, int], bridge: Bridge, layout: Layout):
        self._bridge, self._layout, self._saved_tp = bridge, layout, saved["tp"]
        self._files: dict[tuple[int, int], Any] = {}
        self._stage_of: dict[str, int] = {}
        for stage in range(saved["pp"]):
            for part in range(saved["tp"]):
                path = folder / f"model-tp{part}-pp{stage}.safetensors"
                try:
                    self._files[part, stage] = safe_open(path, framework="pt", device="cpu")
                except (OSError, SafetensorError) as error:
                    raise CheckpointError(f"{path} cannot be read ({error}); use another checkpoint") from error
            for key in self._files[0, stage].keys():  # noqa: SIM118
                self._stage_of.setdefault(key, stage)

    def local(self, kind: str, name: str, parameter: Tensor) -> Tensor:
        """This rank's part of a tensor that is laid out like ``parameter``."""
        key = f"{kind}/{name}"
        if key not in self._stage_of and name == "output_layer.weight":
            # Saved in one stage, loaded in several: the tied head is a copy of the embedding.
            key = f"{kind}/embedding.word_embeddings.weight"
        if key not in self._stage_of:
            raise CheckpointError(f"the checkpoint has no {key!r}; it is of another model")
        stage = self._stage_of[key]
        parts = [self._files[part, stage].get_tensor(key) for part in range(self._saved_tp)]
        split = bool(getattr(parameter, "tensor_model_parallel", False))
        if not split:
            value = parts[0]
        elif self._saved_tp == self._layout.tp:
            value = parts[self._layout.tp_rank]
        else:
            value = self._resplit(name, parts, parameter)
        if value.shape != parameter.shape:
            raise CheckpointError(
                f"the checkpoint's {key!r} has shape {tuple(value.shape)}, this model's {tuple(parameter.shape)}; "
                "it is of another model"
            )
        return value

    def _resplit(self, name: str, parts: list[Tensor], parameter: Tensor) -> Tensor:
        bridge = self._bridge
        if len(parts) == 1:
            whole = parts[0]
        elif name.endswith(("linear_fc1.weight", "linear_fc1.bias")):
            # Each part is its own [gate; up].
            whole = torch.cat([torch.cat(half) for half in zip(*(p.chunk(2) for p in parts), strict=True)])
        else:
            whole = torch.cat(parts, dim=vars(parameter)["partition_dim"])
        if name in _EMBEDDINGS:
            whole = whole[: bridge.vocab_size]
            missing = bridge.padded_vocab_size - bridge.vocab_size
            whole = torch.cat([whole, whole.new_zeros(missing, whole.shape[1])]) if missing else whole
        return bridge._weight_split_across_tp(name, whole, parameter, self._layout.tp)[self._layout.tp_rank]


def _random_states() -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if not cpu.on_cpu():
        states["cuda"] = torch.cuda.get_rng_state()
    for name, state in get_cuda_rng_tracker().get_states().items():
        states[f"tracker/{name}"] = state
    return states


def _set_random_states(path: Path) -> None:
    with safe_open(path, framework="pt", device="cpu") as file:
        states = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    torch.set_rng_state(states.pop("cpu"))
    cuda = states.pop("cuda", None)
    if cuda is not None and not cpu.on_cpu():
        torch.cuda.set_rng_state(cuda)
    get_cuda_rng_tracker().set_states({k.removeprefix("tracker/"): v for k, v in states.items()})


def _barrier(layout: Layout) -> None:
    if layout.world_size > 1:
        dist.barrier()
