"""torch's compiler is imported when it is used, and works then."""

import subprocess
import sys

import pytest
import torch

from agentrl.processes import imports


@pytest.fixture
def deferred(monkeypatch):
    """``torch.compile`` and ``torch.compiler.disable`` put off; what was asked of the real ones."""
    asked = []

    def compile_now(function, **options):
        asked.append(options)
        return lambda *args: ("compiled", function(*args))

    monkeypatch.setattr(torch, "compile", compile_now)
    monkeypatch.setattr(torch.compiler, "disable", lambda function, recursive, **options: function)
    imports.compile_when_called()
    return asked


def test_a_function_is_compiled_at_its_first_call(deferred):
    @torch.compile(dynamic=True)
    def double(x):
        """Twice."""
        return 2 * x

    plain = torch.compile(lambda x: x)
    assert deferred == [] and double.__name__ == "double" and double.__doc__ == "Twice."
    assert double(3) == ("compiled", 6) and double(4) == ("compiled", 8) and deferred == [{"dynamic": True}]
    assert plain(1) == ("compiled", 1) and deferred == [{"dynamic": True}, {}]


def test_a_model_is_compiled_at_once(deferred):
    torch.compile(torch.nn.Identity(), mode="default")
    assert deferred == [{"mode": "default"}]


def test_what_is_kept_from_the_compiler_runs(deferred):
    @torch.compiler.disable(recursive=False)
    def one():
        return 1

    assert one() == 1 == torch.compiler.disable(one)()


def test_models_are_imported_without_the_compiler_which_works_afterwards():
    script = """
import sys
from agentrl.processes import imports
imports.compile_when_called()
with imports.compiler_left_out():
    import transformers.modeling_layers, transformers.masking_utils
assert "torch._dynamo" not in sys.modules and "torch._inductor" not in sys.modules
import torch
from transformers.masking_utils import TransformGetItemToIndex
with TransformGetItemToIndex():
    pass
double = torch.compile(lambda x: 2 * x, backend="eager")
assert double(torch.ones(2)).tolist() == [2, 2]
assert "torch._dynamo" in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


@pytest.mark.slow
def test_an_engine_imports_no_compiler_and_reads_no_kernels():
    script = """
import sys
from agentrl.config.presets import demo_folder
from agentrl.engines.server import import_sglang
import_sglang(str(demo_folder()))
assert "sglang.srt.entrypoints.http_server" in sys.modules
assert not {"torch._dynamo", "megatron.core"} & set(sys.modules)
import inspect, triton
from triton.runtime import jit
modules = [vars(module) for name, module in sys.modules.items() if name.startswith("sglang.")]
kernels = [value for names in modules for value in list(names.values()) if isinstance(value, jit.JITFunction)]
assert kernels and not [kernel for kernel in kernels if len(kernel.raw_src) > 1]
assert jit.inspect is inspect
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=200)
