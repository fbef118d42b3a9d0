"""The interpreter's process as the supervisor holds it: pipes, output, limits, the pause between calls."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import traceback
from typing import Any

from . import confine, driver, syscalls, tree
from .wire import Reader

PIPE_READ = 1 << 16
FENCE_SECONDS = 1.0
FLOOD_BYTES = 8 << 20
"""Output after which a call is ended instead of read on."""


class Output:
    """What the code printed: the first part is kept, the rest is counted and dropped."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept = bytearray()
        self.total = 0

    def take(self, data: bytes) -> None:
        self.total += len(data)
        room = 4 * self._most - len(self._kept)  # a character has at most four bytes
        self._kept += data[: max(room, 0)]

    def text(self) -> tuple[str, int]:
        """The kept part, at most ``most`` characters, and how many bytes are missing."""
        text = self._kept.decode("utf-8", "replace")[: self._most]
        shown = len(text.encode("utf-8", "replace"))
        return text, max(self.total - shown, 0)

    def remove_mark(self, mark: bytes) -> bool:
        """Takes the mark at the end of a call's output away; whether it was there."""
        at = self._kept.find(mark)
        if at >= 0:
            del self._kept[at : at + len(mark)]
            self.total -= len(mark)
        return at >= 0


class Worker:
    """One interpreter, from its start to its end.

    Args:
        settings: the session's; see :meth:`agentrl.tools.sandbox.Sandbox.settings`.

    Raises:
        OSError: no process can be started.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.guards: list[str] = []
        self.output = Output(settings["max_output"])
        self.reply_closed = self.output_closed = False
        self._own: frozenset[int] = frozenset()  # the interpreter and what starts it; all else is the code's
        self._own_threads = 0
        self._cpu = 0.0
        self._replies = Reader(12 * settings["max_output"] + 65536)
        make_folder(settings)
        theirs, ours = _pipes()
        supervisor = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            _become_interpreter(settings, theirs, supervisor)
        for fd in theirs:
            os.close(fd)
        self.request_fd, self.reply_fd, self.output_fd = ours
        self.pidfd = os.pidfd_open(self.pid)

    # -- one call --------------------------------------------------------------------------------

    def ready(self, guards: Any) -> None:
        """The interpreter has started and has run no code yet: what runs now is its own."""
        self.guards = [guard for guard in guards or () if isinstance(guard, str)]
        self._own = frozenset(tree.below(os.getpid()))
        self._own_threads = tree.usage(list(self._own)).threads

    def begin(self) -> None:
        """Lets the interpreter go on for a call."""
        self.output = Output(self.settings["max_output"])
        self._cpu = tree.usage(list(self._own)).cpu
        tree.send(list(self._own), signal.SIGCONT)

    def settle(self, fence: str, wait: Any) -> bool:
        """After a reply: takes the rest of the output, ends what the code left running, stops the interpreter.

        Returns:
            Whether all of it could be ended.
        """
        if not tree.end(keep=self._own):
            return False
        self.read_output()
        if self.settings["fence"]:
            while not (self.output.remove_mark(fence.encode()) or self.output_closed):
                if not wait(self.output_fd, FENCE_SECONDS) or self.read_output() > FLOOD_BYTES:
                    break
        tree.send(list(self._own), signal.SIGSTOP)
        return True

    def limit_passed(self, *, files: bool) -> str | None:
        """Which limit the tree is over, if any."""
        settings = self.settings
        members = tree.below(os.getpid(), most=len(self._own) + settings["max_processes"])
        if len(members) - len(self._own) >= settings["max_processes"]:
            return "processes"
        used = tree.usage(members, settings["memory_mb"] << 20)
        if used.threads - self._own_threads >= settings["max_processes"]:
            return "processes"
        if used.memory > settings["memory_mb"] << 20:
            return "memory"
        if used.cpu - self._cpu > settings["cpu_seconds"]:
            return "cpu"
        tree.reap(keep=frozenset({self.pid}))
        return "disk" if files and self.files_over(members) else None

    def files_over(self, members: list[int]) -> bool:
        """Whether the code keeps more files, or more in them, than it may; open ones without a name count."""
        settings = self.settings
        if settings["folder"] is not None:
            size, count = _measure(settings["folder"], settings["max_files"])
            size += tree.unlinked(members)
        else:
            size, count = self._measure_mounts()
        return count > settings["max_files"] or size > settings["max_disk_mb"] << 20

    def _measure_mounts(self) -> tuple[int, int]:
        """The same for file systems of the sandbox's own, seen through a process that is in there."""
        size, count = 0, 0
        for pid in sorted(self._own, reverse=True) if self.settings["mounts"] else ():
            try:
                found = [os.statvfs(f"/proc/{pid}/root{mount}") for mount in self.settings["mounts"]]
            except OSError:
                continue  # one of the launchers, outside
            size = sum((fs.f_blocks - fs.f_bfree) * fs.f_frsize for fs in found)
            count = sum(fs.f_files - fs.f_ffree for fs in found)
            break
        return size, count

    def read_output(self) -> int:
        """Takes what the pipe holds; how many bytes there were in all so far."""
        for _ in range(64):  # whoever writes faster than this is read again in the next round
            try:
                data = os.read(self.output_fd, PIPE_READ)
            except BlockingIOError:
                break
            if not data:
                self.output_closed = True
                break
            self.output.take(data)
        return self.output.total

    def read_reply(self) -> dict[str, Any] | None:
        """A part of the reply; the reply when it is complete.

        Raises:
            WireError: it is none.
        """
        data = os.read(self.reply_fd, PIPE_READ)
        self.reply_closed = not data
        return self._replies.feed(data)

    # -- its end ---------------------------------------------------------------------------------

    def exit_reason(self) -> str:
        """How the interpreter ended, for the model."""
        try:
            _, status = os.waitpid(self.pid, 0)
        except ChildProcessError:
            return "ended"
        code = os.waitstatus_to_exitcode(status)
        signum = -code if code < 0 else code - 128 if self.settings["command"] and code > 128 else 0
        if signum:
            with contextlib.suppress(ValueError):
                return signal.Signals(signum).name
        return f"exit status {code}"

    def end(self) -> None:
        """Ends it with everything it started."""
        stop = self.settings["stop_command"]
        if stop:
            _run(stop)
        elif self.settings["command"]:
            tree.send([self.pid], signal.SIGKILL)  # the kernel ends all of its namespace, faster than anybody forks
        tree.end()
        for fd in (self.request_fd, self.reply_fd, self.output_fd, self.pidfd):
            os.close(fd)


def make_folder(settings: dict[str, Any]) -> None:
    """The interpreter's working folder, which is its user's own.

    Raises:
        OSError: somebody else has made something of that name.
    """
    folder, uid = settings["folder"], settings["uid"]
    if folder is not None:
        os.mkdir(folder, mode=0o700)
        if uid is not None:
            os.chown(folder, uid, uid, follow_symlinks=False)


def remove_folder(folder: str | None) -> None:
    """Removes a working folder and all in it, also what the code made unreadable. Follows no link.

    By ``rm``: a tree that is deeper than a path is long, or than Python recurses, is no trouble to it.
    """
    if folder is not None and os.path.isdir(folder) and not os.path.islink(folder):
        if os.geteuid() != 0:
            _run(["chmod", "-R", "u+rwX", "--", folder])
        _run(["rm", "-rf", "--", folder])


def _pipes() -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Their ends and ours of the pipes for requests, replies and output; ours do not block."""
    request_read, request_write = os.pipe()
    reply_read, reply_write = os.pipe()
    output_read, output_write = os.pipe()
    ours = request_write, reply_read, output_read
    for fd in ours:
        os.set_blocking(fd, False)
    return (request_read, reply_write, output_write), ours


def _become_interpreter(settings: dict[str, Any], fds: tuple[int, int, int], parent: int) -> None:
    """In the new process: confines itself and serves, or becomes the program that does. Never returns."""
    try:
        os.setsid()
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, signal.SIG_DFL)
        for number, fd in enumerate(fds):
            os.dup2(fd, number)
        os.closerange(3, 4096)  # above all the caller's socket
        os.environ.clear()
        os.environ.update(settings["environment"])
        if settings["command"]:
            confine.confine_launcher(settings, parent)
            command = [*settings["command"][:1], *_filter_option(settings), *settings["command"][1:]]
            os.execve(command[0], command, settings["environment"])
        sys.path += settings["packages"]
        guards = confine.confine(settings, parent, settings["folder"])
        for name in [name for name in sys.modules if name.split(".")[0] == __name__.split(".")[0]]:
            del sys.modules[name]
        driver.main(settings, guards)
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(70)


def _filter_option(settings: dict[str, Any]) -> list[str]:
    """Has bubblewrap refuse the system calls that :mod:`.syscalls` names; it reads the filter from a descriptor."""
    steps = syscalls.program() if settings["filter_calls"] else None
    if steps is None:
        return []
    fd = os.memfd_create("filter", 0)
    os.write(fd, steps)
    os.lseek(fd, 0, os.SEEK_SET)
    return ["--seccomp", str(fd)]


def _run(command: list[str], seconds: float = 20.0) -> None:
    """Runs a program of the system, for its effect."""
    try:
        pid = os.posix_spawnp(command[0], command, os.environ)
    except OSError:
        return
    ended = os.pidfd_open(pid)
    if not select.select([ended], [], [], seconds)[0]:
        os.kill(pid, signal.SIGKILL)
    os.close(ended)
    os.waitpid(pid, 0)


def _measure(folder: str, most: int) -> tuple[int, int]:
    """Bytes on disk and number of files below a folder; stops counting after ``most`` of them."""
    size, count, queue = 0, 0, [folder]
    while queue and count <= most:
        try:
            with os.scandir(queue.pop()) as entries:
                for entry in entries:
                    count += 1
                    if count > most:
                        break
                    with contextlib.suppress(OSError):
                        size += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        queue.append(entry.path)
        except FileNotFoundError:
            continue
        except OSError:
            return size, most + 1  # too deep or closed to us: what cannot be counted is too much
    return size, count
