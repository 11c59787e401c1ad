"""Forks a `rolltap serve` for every order on standard input: a start takes a third of a second, imports included.

An order is a JSON line `{"config", "log", "env"}`; the answer is the pid. The forked process is one of its own in
every way that matters here: it is killed, and its files and sockets are closed, by the kernel alone.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any, NoReturn

import renderers  # noqa: F401 - what a proxy imports late is imported here, once
import tokenizers  # noqa: F401

import rolltap.calllog.redis
import rolltap.calllog.sql
import rolltap.cli.serve
import rolltap.proxy.app
import rolltap.proxy.server  # noqa: F401
from rolltap import crash
from rolltap.cli.main import app


def serve(order: dict[str, Any]) -> NoReturn:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(order["env"])
    crash.arm(os.environ.get("ROLLTAP_CRASH_AT", ""))
    code = 1
    try:
        app(["serve", "--config", order["config"]])
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    finally:
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries the dead
    print("ready", flush=True)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            serve(json.loads(line))
        print(pid, flush=True)


if __name__ == "__main__":
    main()
