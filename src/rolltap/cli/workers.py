"""`rolltap serve --workers N`: worker processes that share the planes' ports, and a parent that supervises them.

The kernel distributes new connections over the workers. Any worker serves any session: they share only the store, like
proxies on several machines. Each has its own spool, `<data>/spool-K` for the K-th after the first.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from rolltap.calllog.spool import Spool
from rolltap.cli.common import signals_put_back
from rolltap.errors import ConfigError, RolltapError, StoreUnavailable
from rolltap.settings import Settings, with_keys

log = logging.getLogger("rolltap.workers")

SOON_S = 10.0
"""A worker that exits within this many seconds has a fault that a restart would not fix, unless it replaced one that
had served: then its surroundings changed (a server restarted without its settings, a full disk)."""

STORE_AWAY = 75
"""Exit code of a worker that could not reach the store. If it replaced a dead worker, it is started again, also where
no other worker serves."""

RETRY_S = 1.0
PARENT_EVERY_S = 1.0

CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")

Serve = Callable[[Settings, int], None]
"""Serves as the worker with this number until it is told to stop."""


MOST = 64
LAST_SPOOL = 1024


def worker_count(option: str, settings: Settings) -> int:
    """How many workers `--workers` asks for. `auto`: one a core, and at least those whose spool holds calls;
    where the store takes one process, one. Raises `ConfigError` for another text, and for several on such a store."""
    takes_several = settings.store_url.startswith("postgres")
    if option == "auto":
        if not takes_several:
            log.info("one worker: SQLite takes one writing process")
            return 1
        last = max(_with_calls(settings.data, 1), default=0)
        return max(min(usable_cores(), MOST), last + 1)
    if not option.isdecimal() or not 1 <= int(option) <= MOST:
        raise ConfigError(f"--workers {option}: give a number from 1 to {MOST}, or auto")
    if int(option) > 1 and not takes_several:
        raise ConfigError(
            "--workers needs Postgres: SQLite takes one writing process; set store.url to postgresql://..."
        )
    return int(option)


def usable_cores() -> int:
    """The cores that this process may use at once, by its affinity and by its control group's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):  # of another system, or `max`: no quota
        quota, period = CPU_QUOTA.read_text(encoding="ascii").split()
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def serve_with_workers(settings: Settings, count: int, serve: Serve) -> int:
    """Runs `count` workers until a signal; returns the exit code. A worker that dies is replaced."""
    settings = with_keys(settings)
    for number in _with_calls(settings.data, count):
        spool = spool_of(settings.data, number)
        raise ConfigError(f"{spool} holds calls of worker {number}; start once with --workers {number + 1}")
    listen = settings.listen
    reserved = [
        reserve(listen.host_of("agent"), listen.agent_port),
        reserve(listen.host_of("trainer"), listen.trainer_port),
        reserve(listen.host_of("admin"), listen.admin_port),
    ]
    agent, trainer, admin = (each.getsockname()[1] for each in reserved)
    ports = listen.model_copy(update={"agent_port": agent, "trainer_port": trainer, "admin_port": admin})
    return Watch(settings.model_copy(update={"listen": ports}), serve).over(count)


def spool_of(data: Path, worker: int) -> Path:
    return data / (f"spool-{worker}" if worker else "spool")


def counts_of(data: Path) -> Path:
    """The folder where workers write their metrics."""
    return data / "counts"


def spools_beside(data: Path, worker: int, workers: int) -> tuple[Path, ...]:
    """The spools of the other workers."""
    return tuple(spool_of(data, number) for number in range(workers) if number != worker)


def _with_calls(data: Path, first: int) -> Iterator[int]:
    """The workers from `first` whose spool holds calls."""
    for number in range(first, LAST_SPOOL):
        if (path := spool_of(data, number)).exists():
            spool = Spool(path, 0)
            spool.open()
            try:
                if spool.count:
                    yield number
            finally:
                spool.close()


def reserve(host: str, port: int) -> socket.socket:
    """Reserves a port for the workers: bound, but not listening, so no connection waits here."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    holder = socket.socket(family, socket.SOCK_STREAM)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        holder.bind((host, port))
    except OSError as error:
        raise ConfigError(
            f"can't listen on {host}:{port}: {error.strerror}; stop what listens there (another `rolltap serve`?), "
            "or take another port: --agent-port and the like, or [listen] in rolltap.toml"
        ) from error
    return holder


def _end_with(parent: int) -> None:
    """Ends this worker when its parent has died: else it would block the next server's ports, unsupervised."""
    while os.getppid() == parent:
        time.sleep(PARENT_EVERY_S)
    os.kill(os.getpid(), signal.SIGTERM)


@dataclass
class Watch:
    """Starts the workers, replaces dead ones, and ends all of them on a signal."""

    settings: Settings
    serve: Serve
    numbers: dict[int, int] = field(default_factory=dict)  # by process id
    started: dict[int, float] = field(default_factory=dict)  # by process id, on the monotonic clock
    started_anew: set[int] = field(default_factory=set)  # numbers of workers that replaced one that had served
    stopping: bool = False
    code: int = 0

    def over(self, count: int) -> int:
        with signals_put_back(signal.SIGTERM, signal.SIGINT):
            return self._watch(count)

    def _watch(self, count: int) -> int:
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, self._stop)
        for number in range(count):
            self._start(number)
        while self.numbers:
            try:
                process, status = os.wait()
            except ChildProcessError:
                break
            number, lived = self.numbers.pop(process), time.monotonic() - self.started.pop(process)
            if self.stopping:
                continue
            ended = os.waitstatus_to_exitcode(status)
            log.error("worker %d ended with %d after %.0f s", number, ended, lived)
            if ended >= 0 and lived < SOON_S:
                if number in self.started_anew and (ended == STORE_AWAY or self._serves()):
                    time.sleep(RETRY_S)  # meanwhile, the other workers serve
                    if not self.stopping:
                        self._start(number)
                else:
                    log.error("worker %d can't start: this server ends", number)
                    self.code = ended or 1
                    self._stop()
            else:
                self.started_anew.add(number)
                self._start(number)
        return self.code

    def _serves(self) -> bool:
        """Whether a worker has lived long enough to be believed to serve."""
        return any(time.monotonic() - at >= SOON_S for at in self.started.values())

    def _start(self, number: int) -> None:
        parent, process = os.getpid(), os.fork()
        if process == 0:
            threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
            os._exit(self._run(number))
        self.numbers[process], self.started[process] = number, time.monotonic()

    def _run(self, number: int) -> int:
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.default_int_handler)
        try:
            self.serve(self.settings, number)
        except RolltapError as error:
            log.error("worker %d: %s", number, error)
            return STORE_AWAY if isinstance(error, StoreUnavailable) else 2
        except KeyboardInterrupt:
            return 0
        return 0

    def _stop(self, *_: int | FrameType | None) -> None:
        self.stopping = True
        for process in self.numbers:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGTERM)
