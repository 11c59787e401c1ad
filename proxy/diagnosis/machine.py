"""What a server needs of its machine: descriptors, disks that keep what they acknowledge, room on them."""

from __future__ import annotations

import logging
import os
import resource
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from rolltap.contract.admin import Finding

log = logging.getLogger("rolltap.app")

FEW_DESCRIPTORS = 4096
"""Each call in flight takes two, each idle client one."""

TOO_FEW_DESCRIPTORS = 512
"""Below this a server says at its start that it will run out of them."""

LITTLE_ROOM = 1 << 30
FSYNCS = 5
DISHONEST_S = 10e-6
"""No disk writes a block so soon. One that says so acknowledges what is still in its memory."""

IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs"})


def descriptors() -> Finding:
    """The file descriptors that this process has, and may have."""
    used = len(os.listdir("/proc/self/fd"))
    most, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    state = f"{used} of {most}"
    advice = f"raise the limit: LimitNOFILE=65536 in systemd, `ulimit -n 65536` in a shell (it may be {hard})"
    if most != resource.RLIM_INFINITY and used > 0.8 * most:
        return Finding("file descriptors", state, f"no client connects when they are used up; {advice}", healthy=False)
    return Finding("file descriptors", state, advice if most < FEW_DESCRIPTORS else "")


def warn_of_few_descriptors() -> None:
    """Without descriptors no connection to the store can be made, so that it looks as if the store were away."""
    most, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < TOO_FEW_DESCRIPTORS:
        log.warning(
            "this process may open %d files, which some dozen clients use up: raise the limit (LimitNOFILE=65536 in "
            "systemd, `ulimit -n %d` in a shell)",
            most,
            hard,
        )


def room_at(what: str, folder: Path, *, needed: int = LITTLE_ROOM) -> Finding:
    """The room on a folder's disk; unhealthy below `needed` bytes."""
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    usage = shutil.disk_usage(nearest)
    state = f"{folder}: {usage.free / 1e9:.1f} of {usage.total / 1e9:.1f} GB free"
    if usage.free < needed:
        return Finding(what, state, "make room, or move it to a larger disk", healthy=False)
    return Finding(what, state)


def honesty_of(folder: Path) -> Finding:
    """Whether the disk of a folder keeps what it has acknowledged, as far as its kind and its speed tell."""
    kind = _kind_of(folder)
    seconds = _fsync_seconds(folder)
    state = f"{folder}: {kind}, {seconds * 1e6:.0f} µs a write"
    if kind in IN_MEMORY:
        advice = "it is memory, so a restart of the machine loses what the spool acknowledged: put `data` on a disk"
        return Finding("disk of the spool", state, advice, healthy=False)
    if seconds < DISHONEST_S:
        return Finding("disk of the spool", state, "so soon no disk has written it: fsync is off somewhere below")
    return Finding("disk of the spool", state)


def _fsync_seconds(folder: Path) -> float:
    """The median time of a small durable write."""
    times: list[float] = []
    with tempfile.TemporaryFile(dir=folder) as file:
        for number in range(FSYNCS):
            os.pwrite(file.fileno(), b"\1" * 4096, number * 4096)
            began = time.perf_counter()
            os.fdatasync(file.fileno())
            times.append(time.perf_counter() - began)
    return statistics.median(times)


def _kind_of(folder: Path) -> str:
    """The file system of a folder, as /proc/mounts has it."""
    device = os.stat(folder).st_dev
    for line in reversed(Path("/proc/mounts").read_text(encoding="utf-8").splitlines()):
        _, place, kind, *_ = line.split()
        try:
            if os.stat(place.replace("\\040", " ")).st_dev == device:
                return kind
        except OSError:
            continue
    return "unknown"
