"""What the model's code may use."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from agentrl.values import check_number


@dataclass(frozen=True)
class Limits:
    """Limits of a sandbox. Which tier keeps which of them is a table in docs/safety.md.

    Raises:
        ConfigError: a value is impossible.
    """

    timeout: float = 10.0
    """Seconds of wall time of a call."""
    cpu_seconds: int | None = None
    """Seconds of CPU time of the interpreter in a call, and of each process that it starts; None: as ``timeout``,
    rounded up."""
    memory_mb: int = 512
    """Mebibytes of address space of each process; in a container, memory of all of them."""
    max_output: int = 4000
    """Characters kept of what a call prints, and of the value shown."""
    max_file_mb: int = 16
    """Mebibytes of one file."""
    max_disk_mb: int = 64
    """Mebibytes of all files of the episode."""
    max_processes: int = 16
    """Processes and threads that run at once, the interpreter's own first one included."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "cpu_seconds" and value is None:
                value = math.ceil(self.timeout)
                object.__setattr__(self, field.name, value)
            whole = field.name != "timeout"
            least = {"memory_mb": 64}.get(field.name, 1 if whole else 0.01)
            check_number(f"sandbox: {field.name}", value, least, whole=whole)
