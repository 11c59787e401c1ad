"""Runs the three planes as uvicorn servers in one event loop, behind the limits of `rolltap.proxy.front`."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import resource
import signal
import socket
import sys
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import uvicorn

from rolltap.errors import ConfigError
from rolltap.proxy.call.http_exchange import BrokenReply
from rolltap.proxy.front.connections import ConnectionLimits, limited, sweep
from rolltap.proxy.front.hosts import Hosts
from rolltap.settings import LimitSettings, ListenSettings

GRACE_S = 10
"""Seconds for which calls in flight may continue after a stop signal."""


WEBSOCKET_ADVICE = ("Unsupported upgrade request.", "No supported WebSocket library")


class _QuietServer(logging.Filter):
    """Suppresses uvicorn's log lines about replies that are cut on purpose (recorded with their call) and about
    WebSockets (Codex asks for them and gets 426)."""

    def filter(self, record: logging.LogRecord) -> bool:
        cut = record.exc_info and isinstance(record.exc_info[1], BrokenReply)
        return not (cut or record.getMessage().startswith(WEBSOCKET_ADVICE))


class _Server(uvicorn.Server):
    """A uvicorn server without signal handlers: `serve` handles signals, so that all planes stop together."""

    def capture_signals(self) -> Any:
        return nullcontext()


def bind(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A listening socket with Nagle off; `ConfigError` says which port is taken. Several processes may share one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"can't listen on {host}:{port}: {error.strerror}; stop what listens there (another `rolltap serve`?), "
            "or take another port: --agent-port and the like, or [listen] in rolltap.toml"
        ) from error
    listener.listen(2048)
    listener.setblocking(False)
    return listener


def settle_memory() -> None:
    """Returns unused memory of the start to the system, and excludes existing objects from garbage collection.

    Reading a vocabulary of 150,000 words leaves about 120 MB that the allocator would keep. Each call creates many
    short-lived objects: with Python's default thresholds, every tenth call would cause a full collection.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def allow_connections(count: int) -> None:
    """Raises this process's limit of open files to `count`, as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


@dataclass(frozen=True, slots=True)
class Front:
    """Creates the planes' servers."""

    limits: LimitSettings
    listen: ListenSettings

    def server(self, app: Any, listener: socket.socket) -> _Server:
        """A plane's server. A plane that listens on loopback answers this machine's own programs only."""
        hosts = Hosts.of(self.listen, listener.getsockname()[0])
        limits = ConnectionLimits(
            self.limits.connections, self.limits.receipt_s, hosts, self.limits.connections_per_key
        )
        return _Server(
            uvicorn.Config(
                app,
                http=limited(limits),
                log_level="warning",
                access_log=False,
                proxy_headers=False,  # nothing asks where a client is; one layer less around every message
                lifespan="off",
                ws="none",
                server_header=False,
                date_header=False,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=GRACE_S,
                ssl_certfile=self.listen.tls_certificate or None,
                ssl_keyfile=self.listen.tls_key or None,
            )
        )


async def serve(
    planes: Mapping[str, tuple[Any, socket.socket]], stop: asyncio.Event, front: Front | None = None
) -> None:
    """Serves each plane's application on its socket until `stop` is set or a signal comes."""
    front = front or Front(LimitSettings(), ListenSettings())
    settle_memory()
    allow_connections(len(planes) * front.limits.connections + 256)
    logging.getLogger("uvicorn.error").addFilter(_QuietServer())
    servers = [front.server(app, listener) for app, listener in planes.values()]
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        with suppress(NotImplementedError, RuntimeError, ValueError):
            loop.add_signal_handler(number, stop.set)
    tasks = [
        asyncio.create_task(server.serve(sockets=[listener]))
        for server, (_, listener) in zip(servers, planes.values(), strict=True)
    ]
    stopping, sweeping = asyncio.create_task(stop.wait()), asyncio.create_task(sweep(servers))
    await asyncio.wait([stopping, *tasks], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    sweeping.cancel()
    for server in servers:
        server.should_exit = True
    await asyncio.gather(*tasks)
