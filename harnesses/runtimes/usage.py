"""What a run takes of the disk and the memory, also by files that have no name.

A file that was deleted while it is open takes its space until it is closed; a memory file (`memfd_create`, shared
memory) takes memory also where it is not mapped. Both are found by the descriptors of the run's processes.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

FILE_BYTES = 4096
"""The least that a file, folder or link counts: a file system has a limited number of them."""
LONG_PATH = 2048
"""Longer paths are read from a descriptor on the way: the kernel takes none of over 4,096 bytes."""
DEEPEST = 200
"""The most such descriptors at once. What lies deeper is more than any run may have."""
TOO_DEEP = 1 << 62
MOST_DESCRIPTORS = 20_000
MEMORY_FILES = ("/memfd:", "/dev/shm/", "/SYSV", "/dev/zero (deleted)")
SCRATCH = ("/tmp", "/var/tmp", "/dev/shm")


@dataclass(frozen=True, slots=True)
class OpenUsage:
    """Bytes of files that are not in a run's folders: deleted ones on a disk, and those in memory."""

    disk: int = 0
    memory: int = 0


def open_usage(pids: Collection[int]) -> OpenUsage:
    """What the processes hold by descriptors and mappings, each file once, and by the sandbox's folders in memory.

    Processes of another user can't be read and count nothing. Of a run with very many descriptors, not all are read.
    """
    disk: dict[tuple[int, int], int] = {}
    memory: dict[tuple[int, int], int] = {}
    for path in islice((path for pid in pids for path in _descriptors(pid)), MOST_DESCRIPTORS):
        with suppress(OSError):
            status = os.stat(path)
            if status.st_nlink or not stat.S_ISREG(status.st_mode):
                continue
            in_memory = os.readlink(path).startswith(MEMORY_FILES)
            (memory if in_memory else disk)[status.st_dev, status.st_ino] = status.st_blocks * 512
    return OpenUsage(sum(disk.values()), sum(memory.values()) + _scratch_usage(pids))


def _descriptors(pid: int) -> Iterator[str]:
    """Of a process: its open files, and the deleted ones that it has mapped (for root only)."""
    with suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            yield f"/proc/{pid}/fd/{name}"
        with open(f"/proc/{pid}/maps", "rb") as file:
            maps = file.read()
        if b"(deleted)" in maps:
            for line in maps.splitlines():
                if line.endswith(b"(deleted)"):
                    yield f"/proc/{pid}/map_files/{line.split(maxsplit=1)[0].decode()}"


def _scratch_usage(pids: Collection[int]) -> int:
    """Bytes in the scratch folders of a sandbox, which are in memory; 0 where they are the machine's own."""
    ours = {os.stat(path).st_dev for path in SCRATCH if os.path.isdir(path)}
    used: dict[int, int] = {}
    for pid in pids:
        for path in SCRATCH:
            with suppress(OSError):
                place = f"/proc/{pid}/root{path}"
                device = os.stat(place).st_dev
                if device not in ours and device not in used:
                    sizes = os.statvfs(place)
                    used[device] = (sizes.f_blocks - sizes.f_bfree) * sizes.f_frsize
    return sum(used.values())


def disk_usage(paths: Sequence[Path]) -> int:
    """The size on disk of files and folders in bytes, at any depth. Links are not followed."""
    total = 0
    for path in paths:
        with suppress(OSError):
            status = os.lstat(path)
            total += max(FILE_BYTES, status.st_blocks * 512)
            if stat.S_ISDIR(status.st_mode):
                total += _folder_usage(str(path))
    return total


def _folder_usage(root: str) -> int:
    total, opened = 0, list[int]()
    waiting = [root]
    try:
        while waiting:
            folder = waiting.pop()
            if len(folder) > LONG_PATH:
                if len(opened) >= DEEPEST:
                    return TOO_DEEP
                with suppress(OSError):
                    opened.append(os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW))
                    folder = f"/proc/self/fd/{opened[-1]}"
            with suppress(OSError), os.scandir(folder) as entries:
                for entry in entries:
                    with suppress(OSError):
                        if entry.is_dir(follow_symlinks=False):
                            waiting.append(entry.path)
                        total += max(FILE_BYTES, entry.stat(follow_symlinks=False).st_blocks * 512)
    finally:
        for descriptor in opened:
            os.close(descriptor)
    return total
