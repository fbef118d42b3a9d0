"""What Megatron-core asks of CUDA, answered for a machine without it.

Megatron-core 0.16 computes nothing on the GPU that it could not compute on the CPU (with its local
layer spec), but it names the device in passing. :func:`install` answers exactly these questions,
and only inside Megatron's own modules: they see a ``torch`` of ours
(:class:`_CpuTorch`) that is torch with these differences.

==============================================  ===========================================
asked                                           answered
==============================================  ===========================================
``zeros``, ``ones``, ``empty``, ``full``,       the CPU's tensor (token counters of the schedules,
``tensor``, ``arange`` with ``device="cuda"``   scalars of the optimizer and of gradient norms)
``torch.cuda.current_device()``                 ``torch.device("cpu")`` (buffers of collectives,
                                                gradient buffers, shapes sent between stages)
``torch.cuda.synchronize``, ``empty_cache``,    nothing: CPU work is done when the call returns
``set_device``, ``nvtx``
``torch.cuda`` random state, ``manual_seed``    the CPU's (weight initialization, dropout)
``torch.cuda.Stream``, ``current_stream``,      one stream that is always done (experts count their
``stream``                                      tokens on a stream of their own)
==============================================  ===========================================

Six more are not questions to ``torch`` and are replaced one by one:

- ``Tensor.cuda()``, called on the tied embedding of pipeline stages: the tensor itself. This is the
  only change outside Megatron's modules; without CUDA the call could only have raised.
- ``tensor_parallel.random._set_cuda_rng_state``: sets the CPU's state.
- ``clip_grad_by_total_norm_fp32``: asserts the type name ``torch.cuda.FloatTensor``; ours multiplies.
- ``DistributedOptimizer`` and ``Float16OptimizerWithFloat16Params`` sort parameters by the type name
  ``torch.cuda.*``: while they are constructed, a CPU tensor gives that name.
- ``maybe_move_tensor_to_cpu`` of the experts' dispatcher: numbers of tokens become numpy's, though they are here.
- ``megatron.core.jit.jit_fuser``, which compiles functions of the experts' routers: they run as they are.

And two that are no question of the device, where TransformerEngine is not installed: the experts' router asks for a
name (``te_general_gemm``) that is then not defined, and latent attention believes that it is there.

Fusions that would start a compiler (``bias_swiglu_fusion`` and the like) are off in the configuration
of `model.py` unless asked for.

With CUDA present :func:`install` does nothing else than that last. It may be called often.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from agentrl.processes.imports import compile_when_called

_FACTORIES = ("zeros", "ones", "empty", "full", "tensor", "arange", "rand", "randn")
_PREFIXES = ("megatron.core",)
_MODULES = (
    "megatron.core.optimizer",
    "megatron.core.distributed",
    "megatron.core.pipeline_parallel",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.dist_checkpointing",
)
_CPU = torch.device("cpu")


def on_cpu() -> bool:
    """Whether the trainer runs on the CPU: there is no CUDA device."""
    return not torch.cuda.is_available()


def install() -> bool:
    """Make Megatron-core run on the CPU when there is no CUDA. Returns whether it did.

    Call it after the last import of Megatron's modules and before the first use; modules that it
    does not know of yet are reached by calling it again.
    """
    if not on_cpu():
        _without_transformer_engine()
        return False
    import_megatron()
    _without_transformer_engine()
    proxy = _proxy()
    for name, module in list(sys.modules.items()):
        if name.startswith(_PREFIXES) and getattr(module, "torch", None) is torch:
            vars(module)["torch"] = proxy
    _replace_functions()
    return True


def import_megatron() -> None:
    """Import what a trainer needs of Megatron-core.

    Their warnings (deprecations of their own internals, optional packages that are not there) are
    addressed to their developers and are turned off for this process.
    """
    for module in (r"megatron\.", r"torch\.distributed\.c10d_logger", r"torch\.jit\."):
        warnings.filterwarnings("ignore", module=module)
    compile_when_called()
    importlib.import_module("megatron.core.jit").disable_jit_fuser()
    for name in _MODULES:
        importlib.import_module(name)


class _CpuTorch(types.ModuleType):
    """``torch``, or ``torch.cuda``, as Megatron's modules see it: every attribute is torch's, save those listed
    above."""

    def __init__(self, real: types.ModuleType):
        super().__init__(real.__name__)
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


@functools.cache
def _proxy() -> _CpuTorch:
    proxy = _CpuTorch(torch)
    # Copied so that a look-up costs what it costs in torch itself.
    vars(proxy).update({k: v for k, v in torch.__dict__.items() if not k.startswith("__")})
    vars(proxy).update({name: _on_the_cpu(getattr(torch, name)) for name in _FACTORIES}, cuda=_cuda())
    return proxy


def _cuda() -> _CpuTorch:
    cuda = _CpuTorch(torch.cuda)
    states = {
        "get_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
        "set_rng_state": lambda state, *args, **kwargs: torch.set_rng_state(state),
    }
    vars(cuda).update(
        dict.fromkeys(("synchronize", "empty_cache", "set_device"), _nothing),
        current_device=lambda: _CPU,
        manual_seed=torch.manual_seed,
        random=types.SimpleNamespace(**states),
        Stream=lambda *args, **kwargs: _STREAM,
        current_stream=lambda *args, **kwargs: _STREAM,
        stream=lambda stream: contextlib.nullcontext(),
        nvtx=types.SimpleNamespace(range_push=_nothing, range_pop=_nothing),
        **states,
    )
    return cuda


class _Stream:
    """Work that is done when the call returns, and the event that says so."""

    def wait_stream(self, stream: _Stream) -> None:
        pass

    def record_event(self, event: Any = None) -> _Stream:
        return self

    def synchronize(self) -> None:
        pass


_STREAM = _Stream()


def _without_transformer_engine() -> None:
    if importlib.util.find_spec("transformer_engine") is None:
        from megatron.core.transformer import multi_latent_attention
        from megatron.core.transformer.moe import moe_utils

        vars(moe_utils)["te_general_gemm"] = None
        vars(multi_latent_attention)["HAVE_TE"] = False


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Stand-in for a call that has nothing to do on the CPU."""


def _on_the_cpu(factory):
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = _CPU
            kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return make


@functools.cache
def _replace_functions() -> None:
    from megatron.core.optimizer import clip_grads, distrib_optimizer, optimizer
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    token_dispatcher.maybe_move_tensor_to_cpu = _as_on_cpu
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    for module in (clip_grads, optimizer):
        module.clip_grad_by_total_norm_fp32 = _clip_grads
    for cls in (distrib_optimizer.DistributedOptimizer, optimizer.Float16OptimizerWithFloat16Params):
        cls.__init__ = _cuda_type_names()(cls.__init__)


def _as_on_cpu(tensor, as_numpy=False, record_stream=False):
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _clip_grads(parameters, max_norm, total_norm, use_decoupled_grad=False) -> None:
    factor = max_norm / (float(total_norm) + 1.0e-6)
    if factor < 1.0:
        torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], factor)


@contextlib.contextmanager
def _cuda_type_names() -> Iterator[None]:
    real = torch.Tensor.type

    def type_name(self, dtype=None, *args, **kwargs):
        if dtype is not None:
            return real(self, dtype, *args, **kwargs)
        return real(self).replace("torch.", "torch.cuda.", 1)

    torch.Tensor.type = type_name  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.Tensor.type = real  # type: ignore[method-assign]
