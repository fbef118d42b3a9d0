"""The process between the caller and the interpreter: it starts one and ends all that came of it.

It runs none of the model's code and reads none of its output. It goes when its caller does, also by ``kill -9``, and
takes the interpreter with it: in ``bubblewrap`` the first process of the namespace, with which the kernel ends all
others; in ``process`` each descendant, which the kernel hands to this process when its own parent ends.

A file on its own, of the standard library, which the base Python runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time

END_SECONDS = 5.0
PR_SET_CHILD_SUBREAPER = 36
KEYCTL, KEYCTL_JOIN_SESSION_KEYRING = {"x86_64": 250, "aarch64": 219}, 1
CLONE_NEWNS, MS_BIND, MS_REC, MS_PRIVATE = 0x20000, 0x1000, 0x4000, 1 << 18

libc = ctypes.CDLL(None, use_errno=True)


def main(plan: dict) -> int:
    """Holds one interpreter until it, the caller or the caller's interest in it ends.

    Args:
        plan: ``command`` and ``environment`` of the interpreter, ``uid`` to run it as (``None``: this one), ``folder``
            it works in (removed at the end) or ``None``, ``open`` (folders that another user must be able to read),
            ``stop`` (a command that ends it from outside, or ``None``), ``caller`` (a process id), ``control`` (a
            descriptor that closes when the caller has enough).

    Returns:
        The interpreter's exit status if it ended by itself, as a shell tells it; 0 if it was ended.
    """
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, lambda *_: sys.exit(1))
    os.umask(0o022)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")  # when memory runs out the kernel takes this process and its children first
    raise_if_failed(libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))
    if (keyctl := KEYCTL.get(os.uname().machine)) is not None:
        # A new one: no namespace covers the keys of the caller's session. Where it fails they are out of reach anyway.
        libc.syscall(keyctl, KEYCTL_JOIN_SESSION_KEYRING, None)
    caller = os.pidfd_open(plan["caller"])
    if os.getppid() != plan["caller"]:
        return 1  # it went before it could be watched
    user = {}
    if plan["uid"] is not None:
        try:
            open_to_others(plan["open"])
        except OSError as error:
            sys.exit(
                f"only root can enter {', '.join(plan['open'])}, where Python is; the code does not run as root, and "
                f"this process may not mount ({error}). Use a Python that all users can read, or be an ordinary user."
            )
        user = {"user": plan["uid"], "group": plan["uid"], "extra_groups": []}
    child = subprocess.Popen(
        plan["command"], env=plan["environment"], cwd=plan["folder"] or "/", start_new_session=True, **user
    )
    ended: dict[int, int] = {}
    signal.signal(signal.SIGCHLD, lambda *_: reap(ended))  # orphans too, which would count as running
    try:
        with open(os.devnull, "r+b") as nothing:  # the pipes are the interpreter's alone
            for fd in (0, 1, 2):
                os.dup2(nothing.fileno(), fd)
        os.write(plan["control"], f"{child.pid}\n".encode())
        poller = select.poll()
        for fd in (plan["control"], caller, os.pidfd_open(child.pid)):
            poller.register(fd, select.POLLIN)
        poller.poll()
        reap(ended)
        status = os.waitstatus_to_exitcode(ended.get(child.pid, 0))
        return status if status >= 0 else 128 - status
    finally:
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if plan["stop"]:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(plan["stop"], env=plan["environment"], timeout=20)
        end_descendants()
        remove(plan["folder"])


def end_descendants() -> None:
    """Kills children until there are none: who loses its parent becomes a child of this process.

    The wait for the first process of a namespace returns when all others of it are gone.
    """
    deadline = time.monotonic() + END_SECONDS
    while time.monotonic() < deadline:
        # A kernel without this file: the interpreter itself goes when this process does.
        with contextlib.suppress(FileNotFoundError), open(f"/proc/self/task/{os.getpid()}/children") as listed:
            for pid in listed.read().split():
                os.kill(int(pid), signal.SIGKILL)  # not yet waited for, so it is no other process
        if reap({}):
            return
        time.sleep(0.001)


def reap(ended: dict[int, int]) -> bool:
    """Takes note of children that ended, by id; whether there is none left."""
    try:
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return False
            ended[pid] = status
    except ChildProcessError:
        return True


def remove(folder: str | None) -> None:
    """Removes a working folder, by ``rm``: a tree that is deeper than Python recurses is no trouble to it."""
    if folder is not None and os.path.isdir(folder):
        if os.geteuid() != 0:  # what the code made unreadable
            subprocess.run(["chmod", "-R", "u+rwX", "--", folder], stderr=subprocess.DEVNULL)
        subprocess.run(["rm", "-rf", "--", folder], stderr=subprocess.DEVNULL)


def open_to_others(folders: list[str]) -> None:
    """Lets other users walk to folders below one that is closed to them (a Python below ``/root``, say).

    Seen by this process and its children only: in a mount namespace of their own, an empty folder that anybody may
    walk through takes the place of the closed one, and holds nothing but ``folders``.

    Raises OSError: this process may not mount."""
    if not folders:
        return
    raise_if_failed(libc.unshare(CLONE_NEWNS))
    raise_if_failed(libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None))
    opened = {folder: os.open(folder, os.O_PATH) for folder in folders}
    for folder, fd in opened.items():
        parents = [folder[:end] for end, letter in enumerate(folder) if letter == "/" and end]
        closed = next((parent for parent in parents if not os.stat(parent).st_mode & 0o1), None)
        if closed is not None:
            raise_if_failed(libc.mount(b"tmpfs", os.fsencode(closed), b"tmpfs", 0, b"mode=755,size=1m"))
        os.makedirs(folder, exist_ok=True)
        raise_if_failed(libc.mount(b"/proc/self/fd/%d" % fd, os.fsencode(folder), None, MS_BIND | MS_REC, None))
        os.close(fd)


def raise_if_failed(result: int) -> None:
    """Raises OSError if a call of the C library failed."""
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
