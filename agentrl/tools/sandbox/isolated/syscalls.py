"""Which system calls the model's code does without: a seccomp filter, as the kernel takes it.

Refused are calls that get memory which no limit counts (memory objects without a file or a mapping), calls that reach
into other processes, and parts of the kernel that programs hardly use and attacks often do. Everything else is allowed.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

_NUMBERS = {  # linux/audit.h, asm/unistd.h
    "x86_64": (0xC000003E, {"clone": 56, "clone3": 435}),
    "aarch64": (0xC00000B7, {"clone": 220, "clone3": 435}),
}
_REFUSED = {
    "x86_64": {
        "shmget": 29,
        "msgget": 68,
        "memfd_create": 319,
        "memfd_secret": 447,
        "ptrace": 101,
        "process_vm_readv": 310,
        "process_vm_writev": 311,
        "unshare": 272,
        "setns": 308,
        "add_key": 248,
        "request_key": 249,
        "keyctl": 250,
        "bpf": 321,
        "userfaultfd": 323,
        "perf_event_open": 298,
        "io_uring_setup": 425,
    },
    "aarch64": {
        "shmget": 194,
        "msgget": 186,
        "memfd_create": 279,
        "memfd_secret": 447,
        "ptrace": 117,
        "process_vm_readv": 270,
        "process_vm_writev": 271,
        "unshare": 97,
        "setns": 268,
        "add_key": 217,
        "request_key": 218,
        "keyctl": 219,
        "bpf": 280,
        "userfaultfd": 282,
        "perf_event_open": 241,
        "io_uring_setup": 425,
    },
}

_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000
_LOAD, _EQUAL, _AT_LEAST, _HAS_BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # linux/filter.h
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
_X32 = 0x40000000  # the other numbers of an x86_64 kernel
_CLONE_NEWUSER = 0x10000000


def program(machine: str | None = None) -> bytes | None:
    """The filter as ``struct sock_filter`` in a row; ``None`` for a machine whose numbers are not known here."""
    machine = machine or os.uname().machine
    if machine not in _NUMBERS:
        return None
    architecture, clone = _NUMBERS[machine]
    no = _ERROR | errno.EPERM
    steps = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, no),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, no),
        # Its flags are out of a filter's sight; told that there is no such call, libraries take `clone`.
        (_EQUAL, 0, 1, clone["clone3"]),
        (_RETURN, 0, 0, _ERROR | errno.ENOSYS),
    ]
    for number in _REFUSED[machine].values():
        steps += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, no)]
    steps += [
        (_EQUAL, 0, 3, clone["clone"]),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_HAS_BITS, 0, 1, _CLONE_NEWUSER),
        (_RETURN, 0, 0, no),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


def refuse() -> bool:
    """Puts this process and all it will start under the filter; whether the kernel has it.

    Needs ``no_new_privs``.
    """
    steps = program()
    if steps is None:
        return False
    code = ctypes.create_string_buffer(steps, len(steps))
    filter_ = struct.pack("@HxxxxxxP", len(steps) // 8, ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.c_char_p(filter_), 0, 0) == 0
