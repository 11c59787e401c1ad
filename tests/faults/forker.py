"""Forks a `rolltap serve` for every order on standard input: a start takes a seventh of a second of CPU.

An order is a JSON line `{"config", "log", "points"}`; the answer is the pid. The forked process is one of its own in
every way that matters here: it is killed, and its files and sockets are closed, by the kernel alone. What is written
to the named pipe `points`, a line as `rolltap.crash.arm` takes it, becomes the point at which it dies.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
import traceback
from importlib import import_module
from typing import Any, NoReturn

from rolltap import crash
from rolltap.cli.main import app

LATE = (
    "asyncpg",
    "renderers.gpt_oss",
    "sqlalchemy.dialects.postgresql.asyncpg",
    "tokenizers",
    "uvicorn.protocols.http.httptools_impl",
    "uvloop",
    "rolltap.calllog.postgres",
    "rolltap.calllog.redis",
    "rolltap.calllog.spool",
    "rolltap.calllog.sqlite",
    "rolltap.cli.serve",
    "rolltap.proxy.app",
    "rolltap.proxy.server",
)
"""What a proxy imports late is imported here, once."""


def take_points(pipe: int) -> None:
    with os.fdopen(pipe) as lines:
        for line in lines:
            crash.arm(line.strip())


def serve(order: dict[str, Any]) -> NoReturn:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    pipe = os.open(order["points"], os.O_RDWR)  # its own writer as well: it never ends
    threading.Thread(target=take_points, args=(pipe,), daemon=True).start()
    code = 1
    try:
        app(["serve", "--config", order["config"]])
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:  # noqa: BLE001 - os._exit would swallow it
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries the dead
    for name in LATE:
        import_module(name)
    gc.freeze()  # a collection in a forked process would copy all that it shares with this one
    print("ready", flush=True)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            serve(json.loads(line))
        print(pid, flush=True)


if __name__ == "__main__":
    main()
