"""What SGLang's published wheel needs to serve on a CPU, and nothing more.

SGLang itself runs dense models in plain PyTorch on any x86 CPU. Its PyPI wheel does not start there,
because three things are looked for at import time. :func:`install` supplies exactly these:

``SGLANG_USE_CPU_ENGINE=1``
    SGLang's own switch for its CPU platform. Set only if it is not set already.
``sgl_kernel``
    The compiled kernels, whose wheel is CUDA only. On the CPU path SGLang imports names from it and
    calls none of them for dense models without AMX kernels. The placeholder gives any name; calling one
    raises ``NotImplementedError`` with that name, so a model that does need a kernel says so at once.
    SGLang decides for its AMX kernels by an operator of the real library, so the placeholder
    never switches them on.
``torchvision`` and the submodules SGLang imports
    Only image models use it, and its default wheel is built for CUDA. transformers is asked first
    whether torchvision is there and keeps that answer, so that it does not take the placeholder for
    the library.

Where a real module can be imported it is left alone, and with a CUDA device :func:`install` does
nothing at all.

:func:`fork_children` makes SGLang's scheduler and detokenizer children of ``fork`` in place of
``spawn``: the imports, which are most of the start-up time and of the memory, are then done once an
engine and shared by its three processes. It is safe on the CPU only (a CUDA context does not survive
a fork) and only while the parent has one thread, which is checked.

:func:`give_memory_back` does for `release_memory_occupation` what torch_memory_saver does with CUDA.

:func:`look_at_the_machine_once` has SGLang start ``lscpu`` once, and not each time it loads weights.

The module imports only the standard library, so that it can be imported first.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.machinery
import itertools
import mmap
import os
import sys
import threading
import types
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

PLACEHOLDERS: tuple[str, ...] = (
    "sgl_kernel",
    "torchvision",
    "torchvision.io",
    "torchvision.transforms",
    "torchvision.transforms.functional",
    "torchvision.transforms.v2",
    "torchvision.transforms.v2.functional",
)


class Placeholder(types.ModuleType):
    """A module of which every public name is a class that refuses to be called."""

    def __init__(self, name: str) -> None:
        super().__init__(name, doc=f"Placeholder for {name}: see agentrl.engines.cpu_backend.")
        self.__path__: list[str] = []
        self.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        full_name = f"{self.__name__}.{name}"

        def refuse(self: object, *args: object, **kwargs: object) -> None:
            raise NotImplementedError(
                f"{full_name} is not available on the CPU: this model needs a compiled kernel that the "
                "CPU backend does not have. Use a dense model, or a machine with a GPU."
            )

        value = type(name, (), {"__init__": refuse})
        setattr(self, name, value)
        return value


def needed() -> bool:
    """Whether this machine serves on the CPU: torch sees no CUDA device."""
    import torch

    return not torch.cuda.is_available()


def install() -> tuple[str, ...]:
    """Supply what is missing for SGLang on the CPU. Call it before ``sglang`` is imported.

    Must run at import time of the main module: children that are spawned import that module again
    and need the same placeholders.

    Returns:
        The names of the modules that were replaced by placeholders; empty with a CUDA device.
    """
    if not needed():
        return ()
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    from agentrl.processes.imports import compile_when_called

    compile_when_called()
    from transformers.utils import import_utils

    import_utils.is_torchvision_available()
    import_utils.is_torchvision_v2_available()

    replaced = []
    for name in PLACEHOLDERS:
        if isinstance(sys.modules.get(name), Placeholder):
            replaced.append(name)
            continue
        try:
            importlib.import_module(name)
        except (ImportError, OSError, RuntimeError):
            # Absent, or built for a CUDA library or a torch that is not here.
            sys.modules[name] = Placeholder(name)
            replaced.append(name)
    return tuple(replaced)


def fork_children() -> None:
    """Let SGLang start its child processes by ``fork``. CPU only; call it before the launch.

    SGLang sets the start method to ``spawn`` while it launches. That one setting is answered with
    ``fork`` as long as the process has a single thread; otherwise ``spawn`` stays.
    """
    import torch.multiprocessing as mp
    from sglang.srt.entrypoints import engine

    set_envs_and_config = engine._set_envs_and_config

    def set_envs_and_config_then_fork(server_args: object) -> None:
        set_envs_and_config(server_args)
        if threading.active_count() == 1:
            mp.set_start_method("fork", force=True)

    engine._set_envs_and_config = set_envs_and_config_then_fork


def give_memory_back() -> None:
    """Have an engine on the CPU give memory back where SGLang releases it, which does so with CUDA only.

    As there, addresses stay and contents are lost. Resuming has nothing to do: the kernel gives a page again when it is
    touched.
    """
    from sglang.srt import constants
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

    release = SchedulerWeightUpdaterManager.release_memory_occupation

    def release_and_discard(self: Any, request: Any) -> Any:
        answer, tags = release(self, request), request.tags or constants.GPU_MEMORY_ALL_TYPES
        runner = self.tp_worker.model_runner
        if constants.GPU_MEMORY_TYPE_KV_CACHE in tags:
            pool = vars(runner.token_to_kv_pool)
            for name in ("k_buffer", "v_buffer", "kv_buffer"):  # the last of latent attention
                discard(pool.get(name, ()))
        if constants.GPU_MEMORY_TYPE_WEIGHTS in tags:  # SGLang has stashed the buffers
            discard(itertools.chain(runner.model.parameters(), runner.model.buffers()))
        return answer

    SchedulerWeightUpdaterManager.release_memory_occupation = release_and_discard


def discard(tensors: Iterable[Tensor]) -> None:
    """Give the pages under these tensors back to the kernel. They hold zeros then, or at their ends what they held.
    Raises OSError: the kernel refuses."""
    libc, page = ctypes.CDLL(None, use_errno=True), mmap.PAGESIZE
    for tensor in tensors:
        storage = tensor.untyped_storage()
        start = -(-storage.data_ptr() // page) * page
        size = (storage.data_ptr() + storage.nbytes()) // page * page - start
        if size > 0 and libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_DONTNEED):
            raise OSError(error := ctypes.get_errno(), f"{size} bytes are not given back: {os.strerror(error)}")


def look_at_the_machine_once() -> None:
    """Keep what ``lscpu`` says. SGLang asks for the memory that is left whenever it loads weights from files, and for
    that, each time, how many nodes the machine has: half of the time that a small model takes."""
    from sglang.srt.utils import common

    common.parse_lscpu_topology = functools.cache(common.parse_lscpu_topology)
