"""The demo's processes: the embedded engine, the proxy and the trainer, each started as a user would start it."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rolltap.errors import RolltapError

READY_S = 180.0
"""How long a process may take to be up, on a busy machine; one that ends is noticed at once."""

STOP_S = 15.0


class DemoFailed(RolltapError):
    """A process of the demo did not start or ended before its time, or the agent does not run."""


PORTS = range(20_000, 32_768)
"""Below those that systems give to connections: nobody takes one before its server has started."""


def free_ports(count: int) -> list[int]:
    """Different ports that nothing listens on right now."""
    ports: list[int] = []
    for port in random.Random().sample(PORTS, len(PORTS)):
        if len(ports) == count:
            break
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            ports.append(port)
    return ports


@dataclass(slots=True, eq=False)
class Process:
    """A child process with its own log file; the whole group is ended with it."""

    name: str
    child: subprocess.Popen[bytes]
    log: Path

    @classmethod
    def start(cls, name: str, command: list[str], folder: Path, env: dict[str, str] | None = None) -> Process:
        log = folder / f"{name}.log"
        with log.open("wb") as out:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )
        return cls(name, child, log)

    def check(self) -> None:
        """`DemoFailed` with the end of its log if it has ended with an error."""
        code = self.child.poll()
        if code:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-5:])
            raise DemoFailed(f"the {self.name} ended with status {code}; the end of {self.log}:\n{tail}")

    def wait_for(self, url: str) -> None:
        """Waits until `url` answers."""
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            self.check()
            try:
                with urllib.request.urlopen(url, timeout=2):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.05)
        raise DemoFailed(f"the {self.name} was not ready at {url} within {READY_S:g} s; see {self.log}")

    def stop(self) -> None:
        """Ends it in order, then by force."""
        if self.child.poll() is None:
            self.child.send_signal(signal.SIGTERM)
            try:
                self.child.wait(STOP_S)
            except subprocess.TimeoutExpired:
                os.killpg(self.child.pid, signal.SIGKILL)
                self.child.wait()


@dataclass(slots=True, eq=False)
class Stack:
    """The engines and the proxy over a fresh folder; a context manager that leaves nothing running."""

    folder: Path
    model: Path
    policies: dict[str, dict[str, object]]
    replicas: int = 1
    more_engines: tuple[str, ...] = ()  # names of engines beside `local`, for policies that name one
    family: str = "qwen3"  # "": the chat template in the model's folder
    engine_options: tuple[str, ...] = ()
    kind: str = "rolltap"  # of the engines
    processes: list[Process] = field(default_factory=list)
    ports: dict[str, int] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)

    @property
    def admin_url(self) -> str:
        return f"http://127.0.0.1:{self.ports['admin']}"

    @property
    def trainer_url(self) -> str:
        return f"http://127.0.0.1:{self.ports['trainer']}"

    @property
    def engine_names(self) -> list[str]:
        return [*self._local, *self.more_engines]

    @property
    def _local(self) -> list[str]:
        return ["engine", *(f"engine-{number}" for number in range(1, self.replicas))]

    def engine_url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.ports[name]}"

    @property
    def database(self) -> Path:
        return self.folder / "data" / "rolltap.db"

    def __enter__(self) -> Stack:
        names = ("agent", "trainer", "admin", *self.engine_names)
        self.ports = dict(zip(names, free_ports(len(names)), strict=True))
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start(self) -> None:
        engines = [self.start_engine(name) for name in self.engine_names]
        for engine in engines:
            engine.wait_for(f"{self.engine_url(engine.name)}/health")
        config = self.folder / "rolltap.toml"
        config.write_text(self._toml(), encoding="utf-8")
        proxy = Process.start("proxy", [sys.executable, "-m", "rolltap", "serve", "--config", str(config)], self.folder)
        self.processes.append(proxy)
        proxy.wait_for(f"{self.admin_url}/health")
        self.keys = tomllib.loads((self.folder / "data" / "keys.toml").read_text())

    def _toml(self) -> str:
        lines = [
            f"data = {json.dumps(str(self.folder / 'data'))}",
            "[listen]",
            *(f"{plane}_port = {self.ports[plane]}" for plane in ("agent", "trainer", "admin")),
        ]
        for name, processes in {"local": self._local, **{name: [name] for name in self.more_engines}}.items():
            urls = ", ".join(map(self.engine_url, processes))
            lines += [f"[engines.{name}]", f'kind = "{self.kind}"', f'url = "{urls}"']
        for name, options in self.policies.items():
            lines.append(f"[policies.{name}]")
            common: dict[str, object] = {"engine": "local", "model": "tiny", "tokenizer": str(self.model)}
            common |= {"family": self.family} if self.family else {}
            lines += [f"{key} = {_toml_value(value)}" for key, value in {**common, **options}.items()]
        return "\n".join(lines) + "\n"

    def start_engine(self, name: str) -> Process:
        """The engine `name` on its port, not ready yet."""
        command = [sys.executable, "-m", "rolltap.engine", "--model", str(self.model), "--name", "tiny"]
        command += ["--port", str(self.ports[name]), *self.engine_options]
        engine = Process.start(name, command, self.folder, {"OMP_NUM_THREADS": "1"})
        self.processes.append(engine)
        return engine

    def start_trainer(self, arguments: list[str], env: dict[str, str]) -> Process:
        """`rolltap train` against this stack, with `env` over the environment."""
        command = [sys.executable, "-m", "rolltap", "train", "--url", self.trainer_url, *arguments]
        trainer = Process.start("trainer", command, self.folder, {"ROLLTAP_TRAINER_KEY": self.keys["trainer"], **env})
        self.processes.append(trainer)
        return trainer

    def check(self) -> None:
        for process in self.processes:
            process.check()

    def stop(self) -> None:
        for process in reversed(self.processes):
            process.stop()


def _toml_value(value: object) -> str:
    """A value of the settings as TOML: an inline table, or what JSON and TOML write alike."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{name} = {_toml_value(one)}" for name, one in value.items()) + " }"
    return json.dumps(value)
