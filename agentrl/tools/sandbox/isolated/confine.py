"""What a process does to itself before it runs the model's code. None of it can be undone.

Every step is a system call, so that no tool need be installed. Which steps a kernel, a container or a user without
rights does not allow is reported, not hidden: :func:`confine` returns the names of those that hold.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import stat
import sys

from . import syscalls

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_CLONE_NEWIPC = 0x08000000
_CLONE_NEWNET = 0x40000000

# linux/landlock.h
_LANDLOCK_CREATE_RULESET, _LANDLOCK_ADD_RULE, _LANDLOCK_RESTRICT_SELF = 444, 445, 446
_LANDLOCK_CREATE_RULESET_VERSION = 1
_LANDLOCK_RULE_PATH_BENEATH = 1
_FS_EXECUTE, _FS_WRITE_FILE, _FS_READ_FILE, _FS_READ_DIR = 1, 2, 4, 8
_FS_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}  # from which version on
_NET_BIND_AND_CONNECT = 3
_SCOPE_SOCKETS_AND_SIGNALS = 3

SYSTEM = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/etc/ld.so.cache",
    "/etc/alternatives",
    "/etc/localtime",
)
"""What code may read of the machine."""
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")

_libc = ctypes.CDLL(None, use_errno=True)


def become_subreaper() -> None:
    """Orphans among the descendants become children of this process instead of the machine's first."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def confine(settings: dict, parent: int, folder: str) -> list[str]:
    """Confines this process and all it will start.

    Args:
        settings: ``uid`` to become (``None``: stay), ``landlock``, ``network``, ``packages``, and the limits.
        parent: id of the process this one must not outlive.
        folder: the only folder it may write to.

    Returns:
        The guards in force, of ``network`` (no network at all), ``tcp`` (no TCP), ``user`` (a user of its own),
        ``landlock`` (no files of others, no signals to others) and ``seccomp`` (see :mod:`.syscalls`).
    """
    guards = []
    readable = [open_path(path) for path in filter(None, dict.fromkeys(sys.path))]
    system = [fd for fd in map(open_path, SYSTEM) if fd is not None]
    devices = [fd for fd in map(open_path, DEVICES) if fd is not None]
    work = os.open(folder, os.O_PATH)
    if not settings["network"] and _libc.unshare(_CLONE_NEWNET | _CLONE_NEWIPC) == 0:
        guards.append("network")
    os.chdir(folder)
    die_first()
    set_limits(settings)
    if settings["uid"] is not None:
        become(settings["uid"])
        guards.append("user")
    die_with(parent)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    if settings["landlock"]:
        read = [fd for fd in readable if fd is not None]
        guards += _landlock([*read, *system], devices, work, network=settings["network"])
    if syscalls.refuse():
        guards.append("seccomp")
    _move_imports(dict(zip(filter(None, dict.fromkeys(sys.path)), readable, strict=True)))
    for fd in (*system, *devices, work):
        os.close(fd)
    return guards


def confine_launcher(settings: dict, parent: int) -> None:
    """As much of :func:`confine` as the program that builds a stronger sandbox can bear."""
    die_first()
    if settings["limit_launcher"]:
        set_limits(settings)
        if settings["uid"] is not None:
            become(settings["uid"])
    die_with(parent)


def set_limits(settings: dict) -> None:
    """The kernel's limits on each process: memory, file size, open files, processes of the user, no core files."""
    memory = settings["memory_mb"] << 20
    for what, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, settings["max_file_mb"] << 20),
        (resource.RLIMIT_NOFILE, settings["max_open_files"]),
        (resource.RLIMIT_NPROC, settings["nproc"]),
        (resource.RLIMIT_AS, memory),
    ):
        _, ceiling = resource.getrlimit(what)
        if ceiling != resource.RLIM_INFINITY:
            most = min(most, ceiling)
        resource.setrlimit(what, (most, most))


def die_first() -> None:
    """When the machine's memory runs out, the kernel takes this process before the trainer."""
    try:
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as score:
            score.write("1000")
    except OSError:
        return  # no such file in some containers, and the other limits hold


def become(uid: int) -> None:
    """Become a user that owns nothing, for good."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def die_with(parent: int) -> None:
    """Be killed by the kernel when ``parent`` ends. After :func:`become`, which would undo it."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def open_path(path: str) -> int | None:
    """A descriptor that stands for a path, whoever may walk to it later; ``None`` where there is nothing."""
    try:
        return os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return None


def _move_imports(fds: dict[str, int | None]) -> None:
    """Imports go on by descriptor from folders that this user cannot walk to (a Python below /root, say)."""
    moved: dict[str, str] = {}
    for path, fd in fds.items():
        if fd is not None and os.access(path, os.R_OK | os.X_OK):
            os.close(fd)
        elif fd is not None:
            moved[path] = f"/proc/self/fd/{fd}"
    sys.path[:] = [*(moved.get(path, path) for path, fd in fds.items() if fd is not None)]
    sys.path_importer_cache.clear()
    for module in list(sys.modules.values()):
        for index, path in enumerate(getattr(module, "__path__", ())):
            for old, new in moved.items():
                if path.startswith(old + "/"):
                    module.__path__[index] = new + path[len(old) :]
                    break


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


# -- Landlock: the kernel's sandbox for processes without rights (Linux 5.13 and later) -------------


class _Ruleset(ctypes.Structure):
    _fields_ = [("fs", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64)]


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed", ctypes.c_uint64), ("fd", ctypes.c_int32)]


def _landlock(read: list[int], devices: list[int], work: int, *, network: bool) -> list[str]:
    """Reading only below ``read``, writing only below ``work``; no TCP, no signals to others where it can.

    Returns:
        The guards in force; none on a kernel without Landlock.
    """
    version = _libc.syscall(_LANDLOCK_CREATE_RULESET, None, 0, _LANDLOCK_CREATE_RULESET_VERSION)
    if version < 1:
        return []
    rights = _FS_RIGHTS[max(known for known in _FS_RIGHTS if known <= version)]
    no_tcp = not network and version >= 4
    rules = _Ruleset(rights, _NET_BIND_AND_CONNECT if no_tcp else 0, _SCOPE_SOCKETS_AND_SIGNALS if version >= 6 else 0)
    size = 8 if version < 4 else 16 if version < 6 else 24
    ruleset = _libc.syscall(_LANDLOCK_CREATE_RULESET, ctypes.byref(rules), size, 0)
    if ruleset < 0:
        return []
    try:
        for fds, allowed in (
            (read, _FS_EXECUTE | _FS_READ_FILE | _FS_READ_DIR),
            (devices, _FS_READ_FILE | _FS_WRITE_FILE),
            ([work], rights),
        ):
            if not all(_allow(ruleset, fd, allowed) for fd in fds):
                return []
        if _libc.syscall(_LANDLOCK_RESTRICT_SELF, ruleset, 0) != 0:
            return []
        return ["landlock", "tcp"] if no_tcp else ["landlock"]
    finally:
        os.close(ruleset)


def _allow(ruleset: int, fd: int, rights: int) -> bool:
    if not stat.S_ISDIR(os.fstat(fd).st_mode):
        rights &= _FS_EXECUTE | _FS_WRITE_FILE | _FS_READ_FILE
    rule = _PathBeneath(rights, fd)
    return _libc.syscall(_LANDLOCK_ADD_RULE, ruleset, _LANDLOCK_RULE_PATH_BENEATH, ctypes.byref(rule), 0) == 0
