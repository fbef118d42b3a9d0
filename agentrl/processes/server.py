"""Server processes of a run: spawned in their own session, logged to a file, ended as a tree.

Three promises, whatever happens to the owner:

- a server dies when the process that started it dies, also by ``kill -9`` (the kernel's parent-death
  signal, which the server asks for itself by :func:`die_with_owner`);
- :meth:`ServerProcess.stop` ends the server and every descendant by process id, first politely, then
  not, and never takes longer than its deadlines;
- nothing secret is in its arguments or its log: keys travel in the environment.
"""

from __future__ import annotations

import collections
import os
import secrets
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import wait as readable
from pathlib import Path

from agentrl.errors import EngineError
from agentrl.processes.ahead import AheadProcess, hand_over, kind_of, python_environment
from agentrl.processes.tree import Process, descendants, die_with_parent, end_tree, is_running
from agentrl.processes.warden import scratch_folder

API_KEY_ENV = "AGENTRL_API_KEY"
OWNER_ENV = "AGENTRL_OWNER_PID"

# The kernel sends the parent-death signal when the *thread* that forked ends, so all servers
# are forked by this one, which lives as long as the process.
_spawner = ThreadPoolExecutor(max_workers=1, thread_name_prefix="agentrl-spawner")


def new_api_key() -> str:
    """A random key for one run: 192 bits, safe in a header."""
    return secrets.token_urlsafe(24)


def take_api_key() -> str | None:
    """The key from the environment, removed from it so that children and dumps do not have it."""
    return os.environ.pop(API_KEY_ENV, None) or None


def die_with_owner() -> None:
    """Called by a server on itself: be killed by the kernel when the owner is gone."""
    owner = os.environ.get(OWNER_ENV)
    die_with_parent(None if owner is None else int(owner))


def free_port(host: str = "127.0.0.1") -> int:
    """A port that was free a moment ago. Whoever binds it later must be ready to try another."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.bind((host, 0))
        return sock.getsockname()[1]


def port_is_free(host: str, port: int) -> bool:
    """Whether a server could listen on ``host:port`` now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except OSError:
            return False
    return True


class ServerProcess:
    """One server subprocess: start it, wait for its health, know its tree, end it.

    Args:
        name: what messages call it, and the stem of its log file.
        module: the module run as ``python -m module``.
        log_dir: folder of the log file ``<name>.log``; a private temporary folder if ``None``.
        host: address to listen on.
        port: fixed port, or 0 for a free one (retried when somebody takes it first).
        api_key: key that the server asks for; a new random one if ``None``, no key at all if empty.
        health_path: answers 200 when the server can take requests.
    """

    PORT_ATTEMPTS = 4

    def __init__(
        self,
        name: str,
        module: str,
        *,
        log_dir: str | os.PathLike[str] | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        api_key: str | None = None,
        health_path: str = "/health",
    ) -> None:
        self.name = name
        self.module = module
        self.host = host
        self.requested_port = port
        self.port = port
        self.api_key = new_api_key() if api_key is None else api_key
        self.health_path = health_path
        self.scratch: Path | None = None  # private temporary folder, while the server runs
        self._log_dir = log_dir
        self._process: subprocess.Popen[bytes] | AheadProcess | None = None
        self._tree: dict[int, Process] = {}
        self._needed: list[Process] = []
        self._spawning = threading.Lock()
        self._ending = threading.Lock()
        self._stopped = False
        self._log_start = 0

    # What a subclass says about its server.

    def arguments(self) -> list[str]:
        """Command-line arguments of the module, without any key."""
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        """Variables set for the server on top of the owner's environment."""
        return {}

    def ahead(self) -> list[str] | None:
        """What a server is told that is started ahead of its owner (:mod:`agentrl.processes.ahead`); None: never."""
        return None

    def explain(self, log_tail: str) -> str | None:
        """What went wrong, in a sentence, where the log shows a known cause."""
        if "address already in use" in log_tail.lower():
            return f"port {self.port} on {self.host} is in use; give another port, or 0 for a free one"
        return None

    def needs(self, child: Process) -> bool:
        """Whether the server, once it is healthy, serves nothing without this child."""
        return False

    # State.

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def log_path(self) -> Path:
        """The log file; in the temporary folder, and gone with it, where no folder was given."""
        return Path(self._log_dir or self.scratch or ".") / f"{self.name}.log"

    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def wait(self, timeout: float) -> bool:
        """Wait until the server, or a child it needs, ends by itself or ``timeout`` seconds passed; whether one ended.

        Costs no CPU.
        """
        process = self._process
        if process is None:
            return True
        watched: list[int] = []
        try:
            for pid in (process.pid, *(proc.pid for proc in self._needed)):
                # A descriptor that becomes readable when the process ends; `Popen.wait` would poll.
                watched.append(os.pidfd_open(pid))
            if not all(map(is_running, self._needed)):
                return True
            return bool(readable(watched, timeout))
        except ProcessLookupError:
            return True
        finally:
            for descriptor in watched:
                os.close(descriptor)

    def tree(self) -> list[Process]:
        """The server and its descendants, as seen now or earlier, that may still be alive."""
        if self._process is not None:
            for proc in descendants(self._process.pid):
                self._tree[proc.pid] = proc
        return list(self._tree.values())

    # Life.

    def start(self, timeout: float = 180.0) -> None:
        """Spawn the server and return once it is healthy.

        Args:
            timeout: seconds until it must be healthy, over all attempts to find a port.

        Raises:
            EngineError: port in use, the server ended, or it was not healthy in time. The text holds
                the cause and the end of the log. Nothing is left running.
        """
        deadline = time.monotonic() + timeout
        attempts = 1 if self.requested_port else self.PORT_ATTEMPTS
        try:
            for attempt in range(attempts):
                self._spawn()
                if self._wait_until_healthy(deadline, last=attempt == attempts - 1):
                    return
                self._end_tree(1.0)
        except BaseException:
            self.stop(timeout=1.0)
            raise

    def stop(self, timeout: float = 2.0) -> None:
        """End the server and all its descendants; remove its temporary folder. Idempotent.

        A server has nothing to save, so it is not given long to go by itself. Final: a start under way
        in another thread fails, and the object does not start again.

        Args:
            timeout: seconds between SIGTERM to the server and SIGKILL to all that is left.
        """
        with self._spawning:
            self._stopped = True
        self._end_tree(timeout)
        if self.scratch is not None:
            shutil.rmtree(self.scratch, ignore_errors=True)

    def log_tail(self, lines: int = 15) -> str:
        """The last lines that this server wrote into its log."""
        try:
            with open(self.log_path, "rb") as log:
                log.seek(self._log_start)
                return b"".join(collections.deque(log, maxlen=lines)).decode(errors="replace")
        except FileNotFoundError:
            return ""

    def _spawn(self) -> None:
        if self.requested_port and not port_is_free(self.host, self.requested_port):
            raise EngineError(
                f"{self.name}: port {self.requested_port} on {self.host} is in use. "
                "Give another port, or 0 for a free one."
            )
        self.port = self.requested_port or free_port(self.host)
        if self.scratch is None:
            self.scratch = Path(scratch_folder("server-"))
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        env = {
            **os.environ,
            **python_environment(),
            "TMPDIR": str(self.scratch),
            **self.environment(),
            OWNER_ENV: str(os.getpid()),
            API_KEY_ENV: self.api_key,
        }
        command = [sys.executable, "-m", self.module, *self.arguments()]
        with open(self.log_path, "ab") as log, self._spawning:
            if self._stopped:
                raise EngineError(f"{self.name} was stopped")
            self._log_start = log.tell()
            if (ahead := self.ahead()) is not None:
                kind = kind_of(self.module, ahead, self.environment())
                self._process = hand_over(kind, self.arguments(), env, self.log_path)
                if self._process is not None:
                    return
            self._process = _spawner.submit(
                subprocess.Popen,
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,
            ).result()

    def _wait_until_healthy(self, deadline: float, *, last: bool) -> bool:
        """True when healthy, False when the port was taken by another and may be tried again."""
        process = self._process
        while time.monotonic() < deadline:
            if self._stopped or process is None:
                raise EngineError(f"{self.name} was stopped while it started")
            if process.poll() is not None:
                tail = self.log_tail(200)
                if "address already in use" in tail.lower() and not last:
                    return False
                cause = self.explain(tail) or "it ended while starting"
                raise EngineError(
                    f"{self.name} did not start: {cause} (exit status {process.returncode}). "
                    f"Log: {self.log_path}\n{self.log_tail()}"
                )
            if self.is_healthy():
                self._needed = [proc for proc in self.tree() if self.needs(proc)]
                return True
            time.sleep(0.1)
        raise EngineError(
            f"{self.name} was not healthy in time. Give it longer, or see what it waits for in "
            f"{self.log_path}:\n{self.log_tail()}"
        )

    def is_healthy(self, timeout: float = 2.0) -> bool:
        """Whether the server answers its health path with 200 now (blocking)."""
        request = urllib.request.Request(
            self.url + self.health_path, headers={"Authorization": f"Bearer {self.api_key}"}
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=timeout) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def _end_tree(self, timeout: float) -> None:
        with self._ending:
            process = self._process
            if process is None:
                return
            tree = self.tree()
            # The server ends its own children; told directly, they would look to it like crashes.
            process.terminate()
            try:
                process.wait(timeout=timeout)
            except subprocess.TimeoutExpired:
                tree = self.tree()
            end_tree(tree, grace=0)
            try:
                process.wait(timeout=5.0)
            except subprocess.TimeoutExpired:
                raise EngineError(f"{self.name}: process {process.pid} did not end after SIGKILL") from None
            self._process = None
            self._needed = []
            self._tree.clear()
