"""The ways to run the model's code, and what each needs of the machine.

``bubblewrap``: namespaces made by ``bwrap``. ``container``: docker or podman. ``process``: a process with limits, **no
security boundary**, taken only when it is named. ``auto``: bubblewrap, else the container whose image is given.
"""

from __future__ import annotations

import dataclasses
import functools
import glob
import json
import math
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil

from agentrl.errors import ConfigError, InfraError
from agentrl.processes.warden import SCRATCH_ENV
from agentrl.sandbox import driver
from agentrl.values import check_choice, check_number

TIERS = ("auto", "bubblewrap", "container", "process")
BWRAP_ENV = "AGENTRL_BWRAP"
RUNTIME_ENV = "AGENTRL_CONTAINER_RUNTIME"
MARK_ENV = "AGENTRL_SANDBOX"
"""In the environment of all that a session starts: the name of its interpreter, to find it among processes."""

WORK = "/sandbox"  # a name that no Python lies below
NOBODY = "65534"
OPEN_FILES = 128
HOW_TO = (
    "Install bubblewrap 0.8 or newer (apt-get install bubblewrap), or give an image to docker or podman "
    "(PythonTool(sandbox='container', image=...)). To run a policy's code without a boundary, with your network and "
    "what your user may read, say --sandbox process (PythonTool(sandbox='process')). See docs/safety.md."
)
_LIBRARIES = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
_SYSTEM = (*_LIBRARIES, "/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")
_NETWORK = ("/etc/resolv.conf", "/etc/hosts", "/etc/ssl")
_PYTHON = ("-s", "-S", "-P", "-B")
_FIRST_USER, _USERS = 1_800_000_000, 1 << 22


@dataclasses.dataclass(frozen=True)
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


@dataclasses.dataclass(frozen=True)
class Sandbox:
    """How model code is run: a tier, limits, and what is let in.

    Args:
        tier: one of :data:`TIERS` but ``auto``; see :func:`resolve`.
        limits: what the code may use.
        network: whether it may use the network, in the tiers that are a boundary.
        packages: whether it may import what is installed beside agentrl; the standard library only, if not.
        image: the container's image, which must be there already; tier ``container`` only.
    """

    tier: str
    limits: Limits = Limits()
    network: bool = False
    packages: bool = False
    image: str | None = None

    def plan(self, mark: str) -> dict[str, Any]:
        """What the holder of one interpreter is told, but for who calls it (:func:`.holder.main`). ``mark``: its name,
        unique on this machine."""
        plan: dict[str, Any] = {"uid": None, "folder": None, "open": [], "stop": None}
        plan["environment"] = self.environment(mark)
        tiers = {"process": self._process, "bubblewrap": self._bubblewrap, "container": self._container}
        return plan | tiers[self.tier](mark)

    def environment(self, mark: str, home: str = WORK) -> dict[str, str]:
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

    def _process(self, mark: str) -> dict[str, Any]:
        uid, python = user_of_its_own(), base_python()
        # Another user cannot walk to the run's own temporary files, which are private.
        place = (os.environ.get(SCRATCH_ENV) or tempfile.gettempdir()) if uid is None else "/tmp"
        folder = tempfile.mkdtemp(prefix=f"agentrl-python-{mark}-", dir=place)
        if uid is not None:
            os.chown(folder, uid, uid)
        packages = package_folders() if self.packages else []
        # The kernel counts processes by user.
        processes = self.limits.max_processes + (_threads_of_this_user() if uid is None else 0)
        return {
            "uid": uid,
            "folder": folder,
            "open": closed_to_others([*python_folders(), *packages]),
            "command": [python, *_PYTHON, *self._driver(packages, processes)],
            "environment": self.environment(mark, folder) | libraries(),
        }

    def _bubblewrap(self, mark: str) -> dict[str, Any]:
        bwrap, python, uid = find_bubblewrap(), base_python(), user_of_its_own()
        packages = package_folders() if self.packages else []
        seen = [folder for folder in [*python_folders(), *packages] if not _within(folder, "/usr")]
        size = ["--size", str(self.limits.max_disk_mb << 20), "--tmpfs"]
        arguments = ["--unshare-all", "--unshare-user", "--disable-userns", "--cap-drop", "ALL"]
        arguments += ["--die-with-parent", "--new-session", "--uid", NOBODY, "--gid", NOBODY, "--hostname", "sandbox"]
        arguments += ["--share-net"] if self.network else []
        for path in [*_SYSTEM, *(_NETWORK if self.network else ())]:
            arguments += ["--ro-bind-try", path, path]
        for path in seen:
            arguments += ["--ro-bind", path, path]
        for path in [] if self.packages else _installed(["/", "/usr", "/usr/local", *seen]):
            arguments += ["--tmpfs", path, "--remount-ro", path]
        arguments += ["--proc", "/proc", "--ro-bind", "/proc/sys", "/proc/sys"]
        arguments += ["--dev", "/dev", *size, "/dev/shm", "--remount-ro", "/dev"]
        arguments += [*size, WORK, "--chdir", WORK]
        arguments += [] if any(_within(path, "/tmp") for path in seen) else ["--symlink", WORK, "/tmp"]
        arguments += ["--remount-ro", "/", "--"]
        processes = self.limits.max_processes + 1  # bubblewrap's own; the kernel counts by namespace of users
        return {
            "uid": uid,
            "open": closed_to_others([os.path.dirname(bwrap), *seen]) if uid is not None else [],
            "command": [bwrap, *arguments, python, *_PYTHON, *self._driver(packages, processes)],
        }

    def _container(self, mark: str) -> dict[str, Any]:
        runtime, limits, name = find_runtime(), self.limits, f"agentrl-python-{mark}"
        options = {
            "name": name,
            "pull": "never",
            "user": f"{NOBODY}:{NOBODY}",
            "memory": f"{limits.memory_mb}m",
            "memory-swap": f"{limits.memory_mb}m",
            "pids-limit": limits.max_processes,
            "cpus": 1,
            "cap-drop": "ALL",
            "security-opt": "no-new-privileges",
            "workdir": WORK,
            "entrypoint": "python3",
            "tmpfs": f"{WORK}:size={limits.max_disk_mb}m,mode=1777",
            "shm-size": f"{limits.max_disk_mb}m",
        }
        arguments = [f"--{key}={value}" for key, value in options.items()]
        arguments += ["--rm", "--interactive", "--read-only", *([] if self.network else ["--network=none"])]
        arguments += [f"--env={key}={value}" for key, value in self.environment(mark).items() if key != "PATH"]
        python = ("-s", "-P", "-B") if self.packages else _PYTHON
        ours = ("PATH", "HOME", "DOCKER_HOST", "XDG_RUNTIME_DIR")
        return {
            "command": [runtime, "run", *arguments, self.image, *python, *self._driver([], None)],
            "stop": [runtime, "rm", "--force", name],
            "environment": {key: os.environ[key] for key in ours if key in os.environ},
        }

    def _driver(self, packages: list[str], processes: int | None) -> list[str]:
        """The driver as arguments of a Python that does not have our files."""
        limits = self.limits
        kernel = {
            "RLIMIT_CORE": 0,
            "RLIMIT_FSIZE": limits.max_file_mb << 20,
            "RLIMIT_NOFILE": OPEN_FILES,
            "RLIMIT_AS": limits.memory_mb << 20,
        }
        if processes is not None:
            kernel["RLIMIT_NPROC"] = processes
        settings: dict[str, Any] = {"max_output": limits.max_output, "cpu_seconds": limits.cpu_seconds}
        settings |= {"limits": kernel, "more_path": packages}
        return ["-c", Path(driver.__file__).read_text(encoding="utf-8"), json.dumps(settings)]


def resolve(tier: str, image: str | None = None) -> str:
    """The tier that ``tier`` means on this machine, found out by using it, once a process.
    Raises ConfigError: unknown, or it does not work here; the text says why, and what to do."""
    check_choice("sandbox", tier, TIERS)
    if sys.platform != "linux":
        raise ConfigError(f"the Python sandbox needs Linux, this is {sys.platform}: run agentrl in a Linux container.")
    failures = {}
    for name in ("bubblewrap", *(["container"] if image else [])) if tier == "auto" else (tier,):
        failure = failure_of(name, image)
        if failure is None:
            return name
        failures[name] = failure
    reasons = "; ".join(f"{name} does not work here: {failure}" for name, failure in failures.items())
    raise ConfigError(f"no sandbox for Python code: {reasons}" + (f" {HOW_TO}" if tier != "process" else ""))


@functools.cache
def failure_of(tier: str, image: str | None) -> str | None:
    """Why a tier cannot be used on this machine; ``None`` when it can."""
    from agentrl.sandbox.session import Session

    if tier == "container" and not image:
        return "it needs an image with Python 3.11 or newer that is there: image='NAME'."
    try:
        with Session(Sandbox(tier, image=image)) as session:
            result = session.run("6 * 7")
    except (ConfigError, InfraError) as error:
        return str(error)
    return None if result.value == "42" else f"a first program gave {result}."


def find_bubblewrap() -> str:
    """Path of ``bwrap``: the environment variable ``AGENTRL_BWRAP``, else as the shell would find it."""
    given = os.environ.get(BWRAP_ENV)
    found = shutil.which(given or "bwrap")
    if found is None:
        raise ConfigError(f"{BWRAP_ENV}={given!r} is no program." if given else "there is no bwrap on the PATH.")
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
        f"no container runtime answers ({given or 'docker, podman'}): start its service, or name another by "
        f"{RUNTIME_ENV}."
    )


def base_python() -> str:
    """The interpreter itself, behind virtual environments."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


def libraries() -> dict[str, str]:
    """The variable without which some Pythons do not start."""
    return {key: os.environ[key] for key in ("LD_LIBRARY_PATH",) if key in os.environ}


def python_folders() -> list[str]:
    """What the base Python needs of its own: program, libraries, time zones. Not what else lies below its prefix."""
    wanted = [os.path.dirname(base_python())]
    for prefix in (sys.base_prefix, sys.base_exec_prefix):
        wanted += [os.path.join(prefix, part) for part in ("lib", sys.platlibdir, "share/zoneinfo")]
    return [path for path in dict.fromkeys(map(os.path.realpath, wanted)) if os.path.isdir(path)]


def package_folders() -> list[str]:
    """Where the packages beside agentrl are installed."""
    return [path for path in map(os.path.realpath, sys.path) if path.endswith("-packages") and os.path.isdir(path)]


def user_of_its_own() -> int | None:
    """For root: a user id that nobody else has, for one interpreter. ``None`` for other users, who cannot change."""
    if os.geteuid() != 0:
        return None
    number = secrets.randbelow(_USERS)
    ranges = [tuple(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    inside, _, count = max(ranges, key=lambda row: row[2])
    if inside + count > _FIRST_USER + _USERS:
        return _FIRST_USER + number
    if count < 2:
        raise ConfigError("this user is root in a namespace that has no other user: run agentrl as an ordinary user.")
    return inside + 1 + number % (count - 1)  # a container of an ordinary user has some 65,000


def closed_to_others(folders: Iterable[str]) -> list[str]:
    """Those of the folders that other users cannot walk to."""
    return [path for path in folders if not all(place.stat().st_mode & 0o1 for place in Path(path).parents)]


def _installed(folders: list[str]) -> list[str]:
    """Folders of installed packages in and below those of Python."""
    names = ("site-packages", "dist-packages")
    shapes = ("{}", "python3*/{}", "lib*/python3*/{}")
    return [path for top in folders for shape in shapes for name in names
            for path in glob.glob(os.path.join(top, shape.format(name)))]  # fmt: skip


def _within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _threads_of_this_user() -> int:
    """Threads of all processes of this user, which is what the kernel's limit of processes counts."""
    found = psutil.process_iter(["uids", "num_threads"])  # what may not be known of others is None
    return sum(one.info["num_threads"] or 0 for one in found if (one.info["uids"] or [-1])[0] == os.getuid())
