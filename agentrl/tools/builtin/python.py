"""``PythonTool``: runs the model's Python code in a sandbox, with state over the calls of an episode."""

from __future__ import annotations

import re
import textwrap
from typing import Any

from agentrl.errors import ConfigError
from agentrl.sandbox import TIERS, Limits, Result, Sandbox, Session, resolve
from agentrl.sandbox.session import FLOOD_BYTES, GRACE_SECONDS, START_SECONDS
from agentrl.tools.base import EpisodeEnv, Tool, ToolError, ToolErrorType, ToolResult
from agentrl.values import check_choice

_FENCE = re.compile(r"\s*```(?:python|py)?[ \t]*\n(.*?)\n?```\s*", re.DOTALL)

MAX_CODE = 1_000_000
"""Characters of code in one call."""

LOST = "Variables, imports and files are lost; the next call starts anew."


class PythonTool(Tool):
    """Runs Python code in a sandbox.

    Variables, imports and files stay from call to call within an episode. What the code prints is shown, then the
    value of its last expression as in a REPL, then what it raised. Code that runs too long or ends its interpreter
    loses that state, and the model is told so. The interpreter starts with the first call and ends, with everything it
    started, with the episode or with the process that owns it.

    Which sandbox is a security boundary, and which limits it keeps: docs/safety.md.

    Args:
        sandbox: ``bubblewrap``, ``container``, ``process`` (no boundary), or ``auto``: bubblewrap, else the container
            whose ``image`` is given. None: the environment's ``sandbox`` (``--sandbox``), which is ``auto`` by itself.
        timeout: seconds of wall time of a call.
        cpu_seconds: seconds of CPU time of each process in a call; None: as ``timeout``.
        memory_mb: mebibytes of address space of each process.
        max_output: characters shown of what is printed, and of the value.
        max_file_mb: mebibytes of one file.
        max_disk_mb: mebibytes of all files of the episode.
        max_processes: processes and threads that run at once.
        network: whether code may use the network, where the sandbox can forbid it.
        packages: whether code may import the packages installed beside agentrl; else the standard library only.
        image: image of the container, with Python 3.11 or newer; never pulled.

    Raises:
        ConfigError: a limit is impossible, or there is no such sandbox. Whether it works on this machine is found out
            when an episode starts.

    Example:
        >>> python = PythonTool(sandbox="process")
        >>> print(python(code="x = 6\\nprint('six')\\nx * 7").observation)
        six
        42
        >>> python(code="x").observation
        '6'
        >>> python.close()
    """

    name = "python"
    description = "Runs Python code. Variables are kept between calls; the value of the last expression is shown."

    def __init__(
        self,
        sandbox: str | None = None,
        timeout: float = 10.0,
        cpu_seconds: int | None = None,
        memory_mb: int = 512,
        max_output: int = 4000,
        max_file_mb: int = 16,
        max_processes: int = 16,
        network: bool = False,
        *,
        max_disk_mb: int = 64,
        packages: bool = False,
        image: str | None = None,
    ) -> None:
        self.limits = Limits(
            timeout=timeout,
            cpu_seconds=cpu_seconds,
            memory_mb=memory_mb,
            max_output=max_output,
            max_file_mb=max_file_mb,
            max_disk_mb=max_disk_mb,
            max_processes=max_processes,
        )
        if sandbox is not None:
            check_choice("sandbox", sandbox, TIERS)
        if sandbox == "container" and not image:
            raise ConfigError("sandbox 'container' needs image='NAME', which has Python 3.11 or newer and is there.")
        self.sandbox = sandbox
        self.options: dict[str, Any] = {"network": network, "packages": packages, "image": image}
        # The sandbox keeps the time of a call itself and says what came of it; this one is for when it cannot.
        self.timeout = timeout + 2 * START_SECONDS + 2 * GRACE_SECONDS
        self.tier: str | None = None
        self._session: Session | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_session": None}  # a copy gets an interpreter of its own

    def check(self, env: EpisodeEnv) -> None:
        resolve(self._asked(env), self.options["image"])

    def start(self, env: EpisodeEnv) -> None:
        self.tier = resolve(self._asked(env), self.options["image"])

    def _asked(self, env: EpisodeEnv | None = None) -> str:
        return self.sandbox or getattr(env, "sandbox", None) or "auto"

    def __call__(self, code: str) -> ToolResult:
        """Args:
        code: Python source.
        """
        if len(code) > MAX_CODE:
            raise ToolError(
                f"the code has {len(code):,} characters; at most {MAX_CODE:,} are run.", ToolErrorType.LIMIT
            )
        fenced = _FENCE.fullmatch(code)
        if self.tier is None:
            self.tier = resolve(self._asked(), self.options["image"])
        if self._session is None:
            self._session = Session(Sandbox(self.tier, self.limits, **self.options))
        return self.show(self._session.run(textwrap.dedent(fenced.group(1) if fenced else code)))

    def close(self) -> None:
        """Ends the interpreter and everything that the code started."""
        if self._session is not None:
            self._session.close()
            self._session = None

    def show(self, result: Result) -> ToolResult:
        """A result as the model reads it."""
        parts = [result.output.removesuffix("\n")] if result.output.strip() else []
        if result.cut:
            parts.append(f"[{result.cut} more bytes of output cut]")
        if result.value is not None:
            parts.append(result.value)
        metadata: dict[str, Any] = {"sandbox": self.tier}
        error = None
        if result.lost:
            metadata["state_lost"] = True
            error = self._end_of(result)
            parts.append(str(error))
        elif result.error is not None:
            error = ToolError(result.error.splitlines()[-1] if result.error else "", ToolErrorType.EXECUTION)
            parts.append(result.error)
        return ToolResult("\n".join(parts) or "(no output)", error, metadata=metadata)

    def _end_of(self, result: Result) -> ToolError:
        """Why the interpreter ended, in words that tell the model what to do differently."""
        passed = {
            "timeout": f"the code ran longer than {self.limits.timeout:g} s",
            "output": f"the code printed more than {FLOOD_BYTES >> 20} MB",
        }.get(result.status)
        if result.detail == "SIGXCPU":
            passed = f"the code used more than {self.limits.cpu_seconds} s of CPU time"
        if passed is None:
            return ToolError(f"the code's interpreter ended ({result.detail}). {LOST}", ToolErrorType.EXECUTION)
        kind = ToolErrorType.TIMEOUT if result.status == "timeout" else ToolErrorType.LIMIT
        return ToolError(f"{passed} and was stopped. {LOST}", kind)
