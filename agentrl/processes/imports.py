"""Imports of thousands of modules, made cheaper: without compilers, without collecting garbage.

SGLang, Megatron and transformers decorate functions with ``torch.compile``, which imports the compiler (hundreds of
modules, a second of CPU time) in processes that call none of these functions on a CPU. SGLang decorates hundreds more
with ``triton.jit``, which reads the source of each (three quarters of a second), and none runs on a CPU.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import importlib.util
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Without Python's garbage collector, which takes a fifth of such imports' time and finds nothing."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def compile_when_called() -> None:
    """Have ``torch.compile`` of a function do its work at the first call. CPU only; call it before other imports."""
    import torch

    if torch.cuda.is_available() or getattr(torch.compile, "deferred", False):
        return
    compile_now, disable_now = torch.compile, torch.compiler.disable

    def compile(model: Any = None, **options: Any) -> Any:
        if model is None:
            return functools.partial(compile, **options)
        if isinstance(model, (type, torch.nn.Module)):
            return compile_now(model, **options)
        return _at_first_call(model, functools.partial(compile_now, **options))

    def disable(fn: Any = None, recursive: bool = True, **options: Any) -> Any:
        if fn is None:
            return functools.partial(disable, recursive=recursive, **options)
        if isinstance(fn, (type, torch.nn.Module)):
            return disable_now(fn, recursive, **options)
        return _at_first_call(fn, lambda function: disable_now(function, recursive, **options), _is_there)

    vars(compile)["deferred"] = True
    torch.compile, torch.compiler.disable = compile, disable


def _is_there() -> bool:
    """Without a compiler in the process there is nothing to keep out."""
    return "torch._dynamo" in sys.modules


def _at_first_call(
    function: Callable[..., Any], make: Callable[..., Any], wanted: Callable[[], bool] = lambda: True
) -> Callable[..., Any]:
    made: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not made:
            if not wanted():
                return function(*args, **kwargs)
            made.append(make(function))
        return made[0](*args, **kwargs)

    return call


@contextlib.contextmanager
def compiler_left_out() -> Iterator[None]:
    """While transformers or SGLang is imported: the marks that they put on functions do not import the compiler.

    CPU only, and nothing where there is no torch.
    """
    names = ("torch._dynamo", "torch._dynamo._trace_wrapped_higher_order_op")
    if names[0] in sys.modules or importlib.util.find_spec("torch") is None:
        yield
        return
    import torch

    if torch.cuda.is_available():
        yield
        return

    def mark(function: Any = None, *_: Any, **options: Any) -> Any:
        return mark if function is None else function

    @contextlib.contextmanager
    def when_entered() -> Iterator[None]:
        with importlib.import_module(names[1]).TransformGetItemToIndex():
            yield

    marks, masks = map(types.ModuleType, names)
    vars(marks).update(assume_constant_result=mark, allow_in_graph=mark, disable=mark)
    vars(masks)["TransformGetItemToIndex"] = when_entered
    sys.modules.update(zip(names, (marks, masks), strict=True))
    torch._dynamo = marks
    try:
        yield
    finally:
        del torch._dynamo
        for name in names:
            del sys.modules[name]


@contextlib.contextmanager
def kernels_unread() -> Iterator[None]:
    """While SGLang is imported: Triton does not read the source of kernels. CPU only, and nothing without Triton."""
    import torch

    if torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        yield
        return
    jit = importlib.import_module("triton.runtime.jit")
    reader = types.ModuleType("inspect")
    vars(reader).update(vars(inspect), getsourcelines=lambda function: ([f"def {function.__name__}():\n"], 1))
    vars(jit)["inspect"] = reader
    try:
        yield
    finally:
        vars(jit)["inspect"] = inspect
