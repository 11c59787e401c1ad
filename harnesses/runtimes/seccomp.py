"""A seccomp filter that refuses, with EPERM, the system calls that agents don't need.

It refuses calls with a large kernel attack surface (io_uring, bpf, perf, keyrings, userfaultfd, modules), and those for
mounts, clocks and namespaces. The filter is classic BPF, built here: load the architecture, load the number, compare.
All calls of another architecture than the machine's own, and of x32, are refused.
Source: Linux, `include/uapi/linux/seccomp.h`, `arch/x86/entry/syscalls/syscall_64.tbl`, `asm-generic/unistd.h`.
"""

from __future__ import annotations

import os
import platform
import struct
import tempfile
from typing import IO

BOTH = (*range(425, 428), *range(428, 434), 442)  # io_uring_*; open_tree to fspick; mount_setattr
REFUSED: dict[str, tuple[int, tuple[int, ...]]] = {
    "x86_64": (
        0xC000003E,
        (
            *(
                155,
                163,
                164,
                165,
                166,
                167,
                168,
                169,
                179,
            ),  # pivot_root acct settimeofday mounts swap reboot quotactl
            *(172, 173, 175, 176, 103, 227),  # iopl ioperm (de)init_module syslog clock_settime
            *(246, 248, 249, 250, 272, 298),  # kexec_load add_key request_key keyctl unshare perf_event_open
            *(300, 303, 304, 308, 310, 311, 313),  # fanotify_init *_handle_at setns process_vm_* finit_module
            *(320, 321, 323),  # kexec_file_load bpf userfaultfd
        ),
    ),
    "aarch64": (
        0xC00000B7,
        (
            *(39, 40, 41, 60, 89, 97, 104, 105, 106, 112, 116),
            *(142, 170, 217, 218, 219, 224, 225, 241),
            *(262, 264, 265, 268, 270, 271, 273, 280, 282, 294),
        ),
    ),
}
"""By machine: its `AUDIT_ARCH`, and the numbers of the refused calls."""

LOAD, EQUAL, AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06
ALLOW, DENY = 0x7FFF0000, 0x00050001  # SECCOMP_RET_ALLOW; SECCOMP_RET_ERRNO with EPERM
X32 = 0x40000000


def program(machine: str) -> bytes:
    """The filter for a machine, as `struct sock_filter`s; empty if the machine is not in `REFUSED`."""
    if machine not in REFUSED:
        return b""
    arch, numbers = REFUSED[machine]
    refused = sorted({*BOTH, *numbers})
    count = len(refused)
    steps = [(LOAD, 0, 0, 4), (EQUAL, 0, count + 3, arch), (LOAD, 0, 0, 0), (AT_LEAST, count + 1, 0, X32)]
    steps += [(EQUAL, count - index, 0, number) for index, number in enumerate(refused)]
    steps += [(RETURN, 0, 0, ALLOW), (RETURN, 0, 0, DENY)]
    return b"".join(struct.pack("HBBI", *step) for step in steps)


def filter_file() -> IO[bytes] | None:
    """An open file with the filter for this machine, at its beginning; None if there is no filter."""
    code = program(platform.machine())
    if not code:
        return None
    file = tempfile.TemporaryFile()  # noqa: SIM115  the caller closes it
    file.write(code)
    file.flush()
    os.lseek(file.fileno(), 0, os.SEEK_SET)
    return file
