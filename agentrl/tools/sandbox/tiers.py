"""The three ways to run the model's code, weakest first, and what each needs of the machine.

``process``: a process with limits; **no security boundary**. ``bubblewrap``: namespaces made by ``bwrap``.
``container``: docker or podman. ``auto`` takes bubblewrap where it works, else process.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError, InfraError
from agentrl.tools.sandbox.isolated import confine, driver
from agentrl.tools.sandbox.limits import Limits
from agentrl.warden import SCRATCH_ENV

logger = logging.getLogger(__name__)

TIERS = ("auto", "process", "bubblewrap", "container")
BWRAP_ENV = "AGENTRL_BWRAP"
RUNTIME_ENV = "AGENTRL_CONTAINER_RUNTIME"
MARK_ENV = "AGENTRL_SANDBOX"
"""In the environment of everything a session starts, so that it can be found when all else fails."""

WORK = "/work"
OPEN_FILES = 128
START_SECONDS = 30.0
_FIRST_USER = 1_800_000_000
_PYTHON = ("-s", "-S", "-P", "-B")


@dataclasses.dataclass(frozen=True)
class Sandbox:
    """How model code is run: a tier, limits, and what is let in.

    Args:
        tier: one of :data:`TIERS` but ``auto``; see :func:`resolve`.
        limits: what the code may use.
        network: whether it may use the network.
        packages: whether it may import what is installed beside agentrl; the standard library only, if not.
        image: the container's image, which must be there already; tier ``container`` only.
        own_user: tier ``process``, run as root: become a user of its own.
        landlock: tier ``process``: confine file access by Landlock where the kernel has it.
    """

    tier: str
    limits: Limits = Limits()
    network: bool = False
    packages: bool = False
    image: str | None = None
    own_user: bool = True
    landlock: bool = True

    def environment(self, mark: str, home: str) -> dict[str, str]:
        """All of the environment that the code gets. Nothing of ours is in it."""
        one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        return {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "HOME": home,
            "TMPDIR": home,
            "LANG": "C.UTF-8",
            "TZ": "UTC",
            "PYTHONHASHSEED": "0",
            "MALLOC_ARENA_MAX": "2",
            **one,
            MARK_ENV: mark,
        }

    def settings(self, mark: str, supervisor: int) -> dict[str, Any]:
        """What the supervisor is told.

        Args:
            mark: name of the session, unique on this machine.
            supervisor: process id of its supervisor.
        """
        settings: dict[str, Any] = {
            **dataclasses.asdict(self.limits),
            "network": self.network,
            "max_open_files": OPEN_FILES,
            "start_timeout": START_SECONDS,
            "landlock": False,
            "uid": None,
            "folder": None,
            "mounts": [],
            "packages": [],
            "command": None,
            "stop_command": None,
            "limit_launcher": True,
            "filter_calls": False,
            "fence": False,
            "environment": self.environment(mark, WORK),
        }
        settings.update(
            {"process": self._process, "bubblewrap": self._bubblewrap, "container": self._container}[self.tier](
                mark, supervisor
            )
        )
        settings["nproc"] = self.limits.max_processes + settings.pop("more_processes", 0)
        if settings["uid"] is None:
            settings["nproc"] += _threads_of_this_user()  # the kernel counts by user
        return settings

    def _process(self, mark: str, supervisor: int) -> dict[str, Any]:
        uid = private_user(supervisor) if self.own_user else None
        folder = os.path.join(_scratch(open_to_others=uid is not None), f"agentrl-python-{mark}")
        return {
            "uid": uid,
            "folder": folder,
            "landlock": self.landlock,
            "packages": package_folders() if self.packages else [],
            "environment": self.environment(mark, folder),
        }

    def _bubblewrap(self, mark: str, supervisor: int) -> dict[str, Any]:
        bwrap, python = find_bubblewrap(), base_python()
        more_path = package_folders() if self.packages else []
        seen = [*_python_folders(python), *more_path]
        uid = private_user(supervisor) if all(map(open_to_all, [bwrap, *seen])) else None
        size = str(self.limits.max_disk_mb << 20)
        bound = [*confine.SYSTEM, *(["/etc/resolv.conf", "/etc/hosts", "/etc/ssl"] if self.network else [])]
        arguments = [
            "--unshare-all",
            "--unshare-user",
            "--die-with-parent",
            "--new-session",
            "--disable-userns",
            "--cap-drop",
            "ALL",
        ]
        arguments += ["--uid", "65534", "--gid", "65534"]
        arguments += ["--share-net"] if self.network else []
        arguments += ["--size", size, "--tmpfs", "/tmp"]  # before what is bound below it
        arguments += [word for path in bound for word in ("--ro-bind-try", path, path)]
        arguments += [word for path in seen if not _within(path, "/usr") for word in ("--ro-bind", path, path)]
        arguments += ["--proc", "/proc", "--dev", "/dev", "--size", size, "--tmpfs", "/dev/shm"]
        arguments += ["--remount-ro", "/dev", "--size", size, "--tmpfs", WORK]
        arguments += ["--remount-ro", "/", "--chdir", WORK, "--hostname", "sandbox", "--"]
        program = [python, *_PYTHON, *self._driver(more_path=more_path)]
        return {
            "uid": uid,
            "mounts": [WORK, "/tmp", "/dev/shm"],
            "command": [bwrap, *arguments, *program],
            "filter_calls": True,
            "more_processes": 3,
        }

    def _container(self, mark: str, supervisor: int) -> dict[str, Any]:
        runtime, limits, name = find_runtime(), self.limits, f"agentrl-python-{mark}"
        if not self.image:
            raise ConfigError("sandbox tier 'container' needs an image that has Python 3.11 or newer: image='NAME'.")
        options = {
            "name": name,
            "pull": "never",
            "user": "65534:65534",
            "memory": f"{limits.memory_mb}m",
            "memory-swap": f"{limits.memory_mb}m",
            "pids-limit": limits.max_processes,
            "cpus": 1,
            "cap-drop": "ALL",
            "security-opt": "no-new-privileges",
            "workdir": WORK,
            "entrypoint": "python3",
        }
        arguments = [f"--{key}={value}" for key, value in options.items()]
        arguments += ["--rm", "--interactive", "--read-only", *([] if self.network else ["--network=none"])]
        room = f"size={limits.max_disk_mb}m,nr_inodes={limits.max_files},mode=1777"
        arguments += [f"--tmpfs={WORK}:{room}", f"--tmpfs=/tmp:{room}", f"--shm-size={limits.max_disk_mb}m"]
        arguments += [f"--ulimit=fsize={limits.max_file_mb << 20}", f"--ulimit=nofile={OPEN_FILES}", "--ulimit=core=0"]
        arguments += [f"--env={key}={value}" for key, value in self.environment(mark, WORK).items() if key != "PATH"]
        python = ("-s", "-P", "-B") if self.packages else _PYTHON
        program = [self.image, *python, *self._driver(fence=True)]
        return {
            "command": [runtime, "run", *arguments, *program],
            "stop_command": [runtime, "rm", "--force", name],
            "limit_launcher": False,  # the runtime is a program of its own and runs nothing of the model's
            "fence": True,  # the runtime carries output and replies apart
            "environment": {
                key: os.environ[key] for key in ("PATH", "HOME", "DOCKER_HOST", "XDG_RUNTIME_DIR") if key in os.environ
            },
        }

    def _driver(self, **more: Any) -> list[str]:
        """The driver as arguments of a Python that does not have our files."""
        settings = {"max_output": self.limits.max_output, "cpu_seconds": self.limits.cpu_seconds, **more}
        return ["-c", Path(driver.__file__).read_text(encoding="utf-8"), json.dumps(settings)]


def resolve(tier: str, image: str | None = None) -> str:
    """The tier that ``tier`` means on this machine: ``auto`` becomes one, the others are tried.

    Raises:
        ConfigError: unknown, or it does not work here; the text says why.
    """
    if tier not in TIERS:
        raise ConfigError(f"unknown sandbox tier {tier!r}; expected one of {', '.join(TIERS)}.")
    require_linux()
    if tier == "auto":
        return _best()
    if tier == "bubblewrap" and (failure := bubblewrap_failure()):
        raise ConfigError(f"sandbox tier 'bubblewrap' does not work here: {failure}")
    if tier == "container":
        find_runtime()
        if not image:
            raise ConfigError("sandbox tier 'container' needs an image with Python 3.11 or newer: image='NAME'.")
    return tier


def require_linux() -> None:
    """Raises ConfigError where there is no sandbox at all."""
    if sys.platform != "linux":
        raise ConfigError(f"the Python sandbox needs Linux, this is {sys.platform}: run agentrl in a Linux container.")


@functools.cache
def _best() -> str:
    failure = bubblewrap_failure()
    if failure is None:
        logger.info("the model's Python code runs in bubblewrap")
        return "bubblewrap"
    logger.warning(
        "the model's Python code runs in the tier 'process', which is no security boundary (docs/safety.md); "
        "bubblewrap does not work here: %s",
        failure,
    )
    return "process"


@functools.cache
def bubblewrap_failure() -> str | None:
    """Why bubblewrap cannot be used on this machine; ``None`` when it can. Found out by using it, once."""
    from agentrl.tools.sandbox.session import Session

    try:
        with Session(Sandbox("bubblewrap")) as session:
            result = session.run("6 * 7")
    except (ConfigError, InfraError) as error:
        return str(error)
    return None if result.value == "42" else f"a first program gave {result}"


def find_bubblewrap() -> str:
    """Path of ``bwrap``: the environment variable ``AGENTRL_BWRAP``, else as the shell would find it."""
    given = os.environ.get(BWRAP_ENV)
    found = shutil.which(given or "bwrap")
    if found is None:
        where = (
            f"{BWRAP_ENV}={given!r} is no program" if given else f"there is no bwrap on the PATH ({BWRAP_ENV} names it)"
        )
        raise ConfigError(f"{where}. Install the package bubblewrap, 0.8 or newer.")
    return os.path.realpath(found)


@functools.cache
def find_runtime() -> str:
    """Path of a container runtime that answers: ``AGENTRL_CONTAINER_RUNTIME``, else docker, else podman."""
    given = os.environ.get(RUNTIME_ENV)
    for name in [given] if given else ["docker", "podman"]:
        path = shutil.which(name)
        if path is None:
            continue
        try:
            done = subprocess.run([path, "info"], stdin=subprocess.DEVNULL, capture_output=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0:
            return path
    raise ConfigError(
        f"sandbox tier 'container': no container runtime answers ({given or 'docker, podman'}). "
        f"Start its service, or name another by {RUNTIME_ENV}."
    )


def base_python() -> str:
    """The interpreter itself, behind virtual environments."""
    python = getattr(sys, "_base_executable", None) or sys.executable
    if not python:
        raise ConfigError("this Python does not know its own program (sys.executable is empty).")
    return os.path.realpath(python)


def package_folders() -> list[str]:
    """Where the packages beside agentrl are installed: this Python's folders, and the one numpy came from."""
    folders = [sysconfig.get_path(key) for key in ("purelib", "platlib")]
    numpy = importlib.util.find_spec("numpy")
    if numpy is not None and numpy.origin:
        folders.append(os.path.dirname(os.path.dirname(numpy.origin)))
    return [folder for folder in dict.fromkeys(folders) if os.path.isdir(folder)]


def private_user(supervisor: int) -> int | None:
    """A user id that nobody else has, for the session of this supervisor; ``None`` if this user cannot become it."""
    if os.geteuid() != 0:
        return None
    capabilities = next(
        int(line.split()[1], 16) for line in Path("/proc/self/status").read_text().splitlines() if line[:6] == "CapEff"
    )
    setgid_and_setuid = 1 << 6 | 1 << 7
    if capabilities & setgid_and_setuid != setgid_and_setuid:
        return None
    ranges = [tuple(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    inside, _, count = max(ranges, key=lambda row: row[2])
    if inside == 0 and count > _FIRST_USER + (1 << 23):
        return _FIRST_USER + supervisor
    if count >= 20_000:  # a rootless container: the same id for two sessions is unlikely, and costs only separation
        return inside + count // 2 + supervisor % (count // 2)
    return None


def open_to_all(path: str) -> bool:
    """Whether any user may walk to ``path`` and read it."""
    here = Path(path).resolve()
    if not here.exists():
        return False
    folders = [here, *here.parents] if here.is_dir() else list(here.parents)
    return all(folder.stat().st_mode & 0o1 for folder in folders) and bool(here.stat().st_mode & 0o4)


def _scratch(*, open_to_others: bool) -> str:
    """Where working folders are made: with the run's other temporary files, if another user may walk there."""
    places = [os.environ.get(SCRATCH_ENV), tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm"]
    for place in filter(None, places):
        if os.path.isdir(place) and (not open_to_others or open_to_all(place)):
            return place
    raise InfraError(f"no folder for temporary files that another user can reach; tried {places[1:]}.")


def _python_folders(python: str) -> list[str]:
    wanted = [sys.base_prefix, sys.base_exec_prefix, os.path.dirname(python)]
    found: list[str] = []
    for folder in map(os.path.realpath, wanted):
        if not any(_within(folder, other) for other in found):
            found.append(folder)
    return found


def _within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _threads_of_this_user() -> int:
    """Threads of all processes of this user, which is what the kernel's limit of processes counts."""
    user, threads = os.getuid(), 0
    for pid in _processes():
        try:
            if os.stat(f"/proc/{pid}").st_uid == user:
                threads += int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[17])
        except (FileNotFoundError, ProcessLookupError):
            continue
    return threads


def _processes() -> Iterable[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())
