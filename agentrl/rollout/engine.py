"""An engine: one SGLang server process, described by an :class:`EngineSpec`."""

from __future__ import annotations

import asyncio
import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.errors import EngineError
from agentrl.rollout.process import LOOPBACK_ENV, ServerProcess

_BASE_BYTES = 900 << 20  # the three processes of an engine, measured (proportional set size)


@dataclass(frozen=True)
class EngineSpec:
    """What an engine serves and on what. The same for every engine of a run."""

    model_path: str
    """HF checkpoint folder (config, tokenizer, safetensors)."""
    device: str = "cpu"
    """``cpu`` or ``cuda``."""
    dtype: str | None = None
    """Weights and activations; default float32 on the CPU, bfloat16 on CUDA."""
    tp: int = 1
    """Tensor-parallel size of one engine."""
    mem_fraction: float | None = None
    """SGLang's ``--mem-fraction-static`` (CUDA)."""
    max_total_tokens: int | None = None
    """KV cache size in tokens; default 65,536 on the CPU, SGLang's choice on CUDA."""
    context_length: int | None = None
    """Longest prompt plus answer in tokens; default the model's own."""
    threads: int = 1
    """OpenMP threads of the engine (CPU)."""
    skip_tokenizer: bool = False
    """Serve token ids only: no tokenizer is loaded, stop *strings* do not work."""
    extra: dict[str, Any] = field(default_factory=dict)
    """More SGLang arguments, by flag name with ``-`` or ``_``: ``True`` gives a bare flag, ``None`` or
    ``False`` drops a flag that would be given by default, a list several values."""

    def __post_init__(self) -> None:
        if self.device not in ("cpu", "cuda"):
            raise EngineError(f"EngineSpec.device is {self.device!r}; expected 'cpu' or 'cuda'")

    @property
    def cpu_tokens(self) -> int:
        """Tokens of KV cache on the CPU."""
        return int(self.extra.get("max_total_tokens") or self.max_total_tokens or 65536)

    def kv_bytes(self) -> int:
        """Bytes of KV cache on the CPU, from the checkpoint's config."""
        config = json.loads((Path(self.model_path) / "config.json").read_text())
        config = config.get("text_config", config)
        heads = config.get("num_attention_heads", 1)
        head_dim = config.get("head_dim") or config.get("hidden_size", 0) // heads
        per_layer = 2 * config.get("num_key_value_heads", heads) * head_dim
        return self.cpu_tokens * config.get("num_hidden_layers", 0) * per_layer * self._item_size

    def memory_needed(self) -> int:
        """Bytes an engine takes on the CPU, about: its processes, the weights, the KV cache."""
        weights = sum(file.stat().st_size for file in Path(self.model_path).glob("*.safetensors"))
        # A checkpoint is bf16 as a rule; in float32 the engine holds twice its size.
        return _BASE_BYTES + weights * self._item_size // 2 + self.kv_bytes()

    @property
    def _item_size(self) -> int:
        return 4 if (self.dtype or "float32") in ("float32", "auto") else 2

    def server_arguments(self) -> list[str]:
        """SGLang's command line, without address and key."""
        args: dict[str, Any] = {
            "model-path": self.model_path,
            "device": self.device,
            "dtype": self.dtype or ("float32" if self.device == "cpu" else "bfloat16"),
            "tp-size": self.tp,
            "context-length": self.context_length,
            "mem-fraction-static": self.mem_fraction,
            "max-total-tokens": self.max_total_tokens,
            "skip-server-warmup": True,
            "log-level": "info",
            "log-level-http": "warning",
        }
        if self.skip_tokenizer:
            args["skip-tokenizer-init"] = True
        if self.device == "cpu":
            args |= {
                "attention-backend": "torch_native",
                "sampling-backend": "pytorch",
                "grammar-backend": "none",
                "cuda-graph-backend-decode": "disabled",
                "cuda-graph-backend-prefill": "disabled",
                "max-total-tokens": self.cpu_tokens,
                # Without it an idle scheduler spins on a core.
                "sleep-on-idle": True,
            }
        args |= {name.replace("_", "-").removeprefix("sglang-"): value for name, value in self.extra.items()}
        words: list[str] = []
        for name, value in args.items():
            if value is None or value is False:
                continue
            words.append(f"--{name}")
            if isinstance(value, (list, tuple)):
                words += [str(item) for item in value]
            elif value is not True:
                words.append(json.dumps(value) if isinstance(value, dict) else str(value))
        return words


def available_memory() -> int:
    """Bytes that can be had on this machine, or in this container, without swapping."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and (text := limit.read_text().strip()) != "max":
        available = min(available, max(0, int(text) - int(used.read_text())))
    return available


class EngineProcess(ServerProcess):
    """A running SGLang server on this machine.

    Example::

        engine = EngineProcess(EngineSpec("path/to/model"), log_dir="logs")
        engine.start()
        try:
            ...  # requests to engine.url with the bearer key engine.api_key
        finally:
            engine.stop()
    """

    def __init__(
        self,
        spec: EngineSpec,
        *,
        name: str = "engine-0",
        log_dir: str | os.PathLike[str] | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        api_key: str | None = None,
    ) -> None:
        super().__init__(
            name,
            "agentrl.rollout.sglang_server",
            log_dir=log_dir,
            host=host,
            port=port,
            api_key=api_key,
            health_path="/health",
        )
        self.spec = spec

    def start(self, timeout: float = 300.0) -> None:
        """Spawn the server and return once it answers.

        Raises:
            EngineError: no such model folder, port in use, too little memory, or any other reason why the
                server ended or was not healthy within ``timeout`` seconds.
        """
        folder = Path(self.spec.model_path)
        if not (folder / "config.json").is_file():
            self.stop()
            raise EngineError(
                f"{self.name}: no model at {self.spec.model_path!r} (no config.json there). Give the "
                "folder of an HF checkpoint."
            )
        if self.spec.device == "cpu":
            self._check_memory()
        super().start(timeout)

    def _check_memory(self) -> None:
        """Refuse before the kernel does, which would kill some process or other minutes later."""
        spec, gib = self.spec, 1 << 30
        needed, available = spec.memory_needed(), available_memory()
        if needed > available:
            raise EngineError(
                f"{self.name}: too little memory: it needs about {needed / gib:.1f} GiB, of which the KV cache of "
                f"{spec.cpu_tokens} tokens {spec.kv_bytes() / gib:.1f} GiB; {available / gib:.1f} GiB are available. "
                "Give a smaller max_total_tokens, fewer engines or a smaller model."
            )

    def arguments(self) -> list[str]:
        return [*self.spec.server_arguments(), "--host", self.host, "--port", str(self.port)]

    def environment(self) -> dict[str, str]:
        env = {
            # The cheap health answer; a real one-token generation is asked for by /health_generate.
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
            "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1"),
        }
        if self.host == "127.0.0.1":
            env |= LOOPBACK_ENV
        if self.spec.device == "cpu":
            env |= {
                "OMP_NUM_THREADS": str(self.spec.threads),
                "MKL_NUM_THREADS": str(self.spec.threads),
                "CUDA_VISIBLE_DEVICES": "",
                # Threads that wait must not spin: the trainer has the same cores.
                "OMP_WAIT_POLICY": "PASSIVE",
            }
        return env

    def explain(self, log_tail: str) -> str | None:
        text = log_tail.lower()
        if "address already in use" in text:
            return f"port {self.port} on {self.host} is in use; give another port, or 0 for a free one"
        if "out of memory" in text or "cannot allocate memory" in text or "not enough memory" in text:
            return (
                "too little memory; give a smaller max_total_tokens "
                f"(now {self.spec.max_total_tokens or 'the default'}) or fewer engines"
            )
        if self._process is not None and self._process.returncode == -9:
            return "it was killed (by the kernel for lack of memory, if nobody else did it)"
        return None


class EngineActor:
    """Owns one :class:`EngineProcess`. An ordinary class; :class:`RayEngine` makes a Ray actor of it.

    The server ends with this process, whatever ends it.

    Args:
        host: address the engine listens on. Anything but loopback means "this node's address".
        The rest as for :class:`EngineProcess`.
    """

    def __init__(self, spec: EngineSpec, *, name: str, log_dir: str | None, host: str, api_key: str) -> None:
        if host not in ("127.0.0.1", "localhost"):
            host = node_address()
        self._engine = EngineProcess(spec, name=name, log_dir=log_dir, host=host, api_key=api_key)

    def start(self, timeout: float) -> str:
        """Start the server; its address. Raises EngineError."""
        self._engine.start(timeout)
        return self._engine.url

    def wait(self, timeout: float) -> str | None:
        """Wait for the server to end; the end of its log when it has, ``None`` after ``timeout`` seconds."""
        return self._engine.log_tail() if self._engine.wait(timeout) else None

    def pids(self) -> list[int]:
        """Process ids of the server and its children."""
        return [proc.pid for proc in self._engine.tree()]

    def stop(self) -> None:
        """End the server and all its children."""
        self._engine.stop()


def node_address() -> str:
    """The address under which other nodes reach this one."""
    import ray

    return ray.util.get_node_ip_address()


class LocalEngine:
    """An :class:`EngineActor` in this process; its calls run in threads."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._actor = EngineActor(*args, **kwargs)
        # One waits for the server's end while the other starts and stops it.
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="agentrl-engine")

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method of the actor. Raises what it raises."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, getattr(self._actor, method), *args)

    async def end(self) -> None:
        """End the engine, in whatever state it is: a start under way fails."""
        await asyncio.to_thread(self._actor.stop)
        self._threads.shutdown(wait=False)


class RayEngine:
    """An :class:`EngineActor` as a Ray actor.

    Args:
        ray_options: of the actor (placement, resources).
    """

    def __init__(self, ray_options: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        import ray

        # One thread waits for the server's end while others start and stop it.
        actor = ray.remote(EngineActor).options(max_concurrency=4, max_restarts=0, **ray_options)
        self._handle = actor.remote(*args, **kwargs)

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method of the actor.

        Raises:
            EngineError: what the method raised, or the actor is gone.
        """
        from ray.exceptions import RayActorError, RayTaskError

        try:
            return await getattr(self._handle, method).remote(*args)
        except RayTaskError as error:
            if isinstance(error.cause, EngineError):
                raise error.cause from None
            raise EngineError(f"engine actor: {error}") from error
        except RayActorError as error:
            raise EngineError(f"the actor of an engine is gone: {error}") from error

    async def end(self) -> None:
        """End server and actor. The server dies with the actor even if it cannot be asked."""
        import ray

        try:
            async with asyncio.timeout(20.0):
                await self.call("stop")
        except (EngineError, TimeoutError):
            pass
        ray.kill(self._handle, no_restart=True)
