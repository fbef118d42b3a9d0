"""What SGLang needs on a CPU, where no engine has to run to see it."""

from __future__ import annotations

import pytest

from agentrl.engines import cpu_backend


def test_weights_are_loaded_from_files_without_starting_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang asks for the memory that is left each time, which looks at the machine."""
    cpu_backend.install()
    from sglang.srt.utils import common

    asked, ask = [], common.subprocess.check_output
    monkeypatch.setattr(common, "parse_lscpu_topology", common.parse_lscpu_topology)  # set back afterwards
    monkeypatch.setattr(common.subprocess, "check_output", lambda *args, **kw: asked.append(args) or ask(*args, **kw))
    cpu_backend.look_at_the_machine_once()
    assert common.get_available_gpu_memory("cpu", 0) > 0
    asked.clear()
    assert common.get_available_gpu_memory("cpu", 0) > 0
    assert asked == []
