"""An engine: one SGLang server process, described by an :class:`EngineSpec`."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.errors import EngineError
from agentrl.processes.ahead import servers_ahead
from agentrl.processes.network import collectives_on
from agentrl.processes.server import ServerProcess
from agentrl.processes.tree import Process

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
    seed: int | None = None
    """Of sampling. An :class:`~agentrl.engines.pool.EnginePool` counts up from it, one an engine; ``None``: SGLang's
    own choice."""
    deterministic: bool = False
    """SGLang's deterministic mode: what a request is answered follows from its prompt, its ``sampling_seed`` and the
    weights alone. On the CPU (:mod:`agentrl.engines.cpu_deterministic`) in float32 with one thread."""
    gives_back: bool = False
    """Memory can be released and resumed (CUDA: SGLang's ``--enable-memory-saver``; on the CPU it always can)."""
    skip_tokenizer: bool = False
    """Serve token ids only: no tokenizer is loaded, stop *strings* do not work."""
    extra: dict[str, Any] = field(default_factory=dict)
    """More SGLang arguments, by flag name with ``-`` or ``_``: ``True`` gives a bare flag, ``None`` or
    ``False`` drops a flag that would be given by default, a list several values."""

    def __post_init__(self) -> None:
        if self.device not in ("cpu", "cuda"):
            raise EngineError(f"EngineSpec.device is {self.device!r}; expected 'cpu' or 'cuda'")
        if self.deterministic and self.device == "cpu" and (self.threads != 1 or self._item_size != 4):
            raise EngineError(
                f"a deterministic engine on the CPU computes in float32 with one thread; got {self.dtype}, "
                f"{self.threads} threads"
            )

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
            "random-seed": self.seed,
            "enable-deterministic-inference": self.deterministic,
            "enable-memory-saver": self.gives_back and self.device == "cuda",
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
        super().__init__(name, "agentrl.engines.server", log_dir=log_dir, host=host, port=port, api_key=api_key)
        self.spec = spec

    def start(self, timeout: float = 300.0) -> None:
        """Spawn the server and return once it answers.
        Raises EngineError: no such model folder, port in use, too little memory, or any other reason why the server
        ended or was not healthy within ``timeout`` seconds."""
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
            # That one is given up by who asks: SGLang's own limit of 20 s is less than one step of a large batch takes
            # where other work fills the machine.
            "SGLANG_HEALTH_CHECK_TIMEOUT": "3600",
            "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1"),
            **collectives_on(self.host),
        }
        if self.spec.device == "cpu":
            env |= {
                "OMP_NUM_THREADS": str(self.spec.threads),
                "MKL_NUM_THREADS": str(self.spec.threads),
                "CUDA_VISIBLE_DEVICES": "",
                # Threads that wait must not spin: the trainer has the same cores.
                "OMP_WAIT_POLICY": "PASSIVE",
            }
        return env

    def ahead(self) -> list[str] | None:
        # With GPUs, the actor's own are known only in its process.
        return [self.spec.model_path] if self.spec.device == "cpu" else None

    def needs(self, child: Process) -> bool:
        """Schedulers and detokenizer, by the names that SGLang gives its processes."""
        try:
            return Path(f"/proc/{child.pid}/cmdline").read_bytes().startswith(b"sglang::")
        except OSError:
            return False

    def explain(self, log_tail: str) -> str | None:
        text = log_tail.lower()
        if "out of memory" in text or "cannot allocate memory" in text or "not enough memory" in text:
            return (
                "too little memory; give a smaller max_total_tokens "
                f"(now {self.spec.max_total_tokens or 'the default'}) or fewer engines"
            )
        if self._process is not None and self._process.returncode == -9:
            return "it was killed (by the kernel for lack of memory, if nobody else did it)"
        return super().explain(log_tail)


def engines_ahead(spec: EngineSpec, number: int, *, log_dir: Path) -> contextlib.AbstractContextManager[None]:
    """Within, so many servers for engines of this kind import SGLang while nobody waits for them yet.

    On the CPU only. An engine takes one when it starts, in any process that was started within.
    """
    engine = EngineProcess(spec)
    if (arguments := engine.ahead()) is None:
        return contextlib.nullcontext()
    return servers_ahead(engine.module, arguments, engine.environment(), number, log_dir=log_dir)
