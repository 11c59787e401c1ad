"""The deployment as processes of this machine: `rolltap up --local`, and what the soak breaks.

All of its state is in one folder, which is also the data folder that commands read: `keys.toml`, `listening.json` with
nginx's addresses, a folder for each service, `logs/`. A start on the same folder goes on with the same record and keys.

Each process is started, watched, started again when it ends, and stopped.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from rolltap.deployment.description import (
    FIRST_PORT,
    PLANES,
    PROXIES,
    REDIS_SETTINGS,
    ROLES,
    DeploymentLayout,
    local_layout,
    new_secrets,
    nginx_settings,
    policy_settings,
    ports_from,
    postgres_arguments,
    prometheus_settings,
    proxy_environment,
)
from rolltap.engine.tiny import FOLDER
from rolltap.errors import ConfigError
from rolltap.extras import install_line
from rolltap.settings import KeySettings, PlaneName

READY_S = 180.0
"""How long a service may take to answer, on a busy machine; one that ends is noticed at once."""

STOP_S = 20.0
"""How long the proxies may take to stop after Ctrl-C (they cut their calls after 10 s), and then all other services."""

NGINX = """
daemon off; pid {folder}/pid; error_log stderr warn; worker_processes 2; worker_rlimit_nofile 16384; {user}
events {{ worker_connections 4096; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  include {folder}/rolltap.conf;
}}
"""


@dataclass(frozen=True, slots=True)
class LocalOptions:
    """What may be chosen. `config`: settings with engines and policies of the user's; None: an engine of the
    deployment's own, which answers from `script` if there is one. `elsewhere` has other addresses of what
    a proxy or nginx reaches, by its name (a relay before the store, say), `environment` more variables of the proxies.
    """

    folder: Path
    config: Path | None = None
    script: Path | None = None
    ports: Mapping[str, int] = field(default_factory=lambda: ports_from(FIRST_PORT))
    redis: bool = True
    pinned: bool = True
    elsewhere: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(eq=False)
class LocalDeployment:
    """`start` returns when the deployment takes calls; `look` starts again what has ended; `stop` leaves nothing
    running.
    """

    options: LocalOptions
    children: dict[str, Child] = field(default_factory=dict)
    secrets: dict[str, str] = field(default_factory=dict)
    layout: DeploymentLayout = field(init=False)

    def __post_init__(self) -> None:
        self.folder = self.options.folder.absolute()
        self.layout = local_layout(self.options.ports, self.folder)

    @property
    def urls(self) -> dict[PlaneName, str]:
        """Those of nginx."""
        return {plane: self.layout.url(f"nginx.{plane}") for plane in PLANES}

    @property
    def store_url(self) -> str:
        return self.proxy_environment(PROXIES[0])["ROLLTAP_STORE__URL"]

    def start(self, report: Callable[[str], None]) -> None:
        """Tells `report` what it waits for. `ConfigError` if something is missing, or does not come up."""
        check(self.options)
        self._end_leftovers()
        if taken := [f"{port} ({name})" for name, port in self.options.ports.items() if _listens(port)]:
            raise ConfigError(f"something listens on {', '.join(taken)}: stop it, or take other ports with --port")
        self._make_folder()
        try:
            for name, start in self._services().items():
                report(name)
                start(name)
                self._note_processes()
            report("everything answers")
            self._until_ready()
        except BaseException:
            self.stop()
            raise

    def look(self) -> list[str]:
        """Starts again what has ended, and returns what there is to tell."""
        told = [text for child in self.children.values() if (text := child.look())]
        if told:
            self._note_processes()
        return told

    def stop(self, *, drain_s: float = 0.0) -> None:
        """Proxies first, so that they can write. With `drain_s` their calls may go on for so many seconds."""
        for child in self.children.values():
            child.wanted = False
        proxies = [child for name, child in self.children.items() if name in PROXIES]
        for child in proxies:
            child.signal(signal.SIGTERM if drain_s else signal.SIGINT)
        _kill_after(drain_s + STOP_S, proxies)
        others = [child for name, child in self.children.items() if name not in PROXIES]
        for child in others:
            child.signal(child.stop_signal)
        _kill_after(STOP_S, others)
        self._processes.unlink(missing_ok=True)

    def proxy_environment(self, proxy: str) -> dict[str, str]:
        layout = self._layout_of(proxy)
        own_engine = self.options.config is None
        environment = proxy_environment(
            layout, proxy, str(self.folder / proxy), self.secrets, redis=self.options.redis, engine=own_engine
        )
        if own_engine and layout.addresses["engine"] != self.layout.addresses["engine"]:
            environment["ROLLTAP_ENGINES__MAIN__URL"] = layout.url("engine")
        return {**environment, **self.options.environment}

    def _layout_of(self, process: str) -> DeploymentLayout:
        """The layout with the addresses that this process has of the others."""
        return replace(self.layout, addresses={**self.layout.addresses, **self.options.elsewhere.get(process, {})})

    # Files

    @property
    def _processes(self) -> Path:
        return self.folder / "processes.json"

    def _make_folder(self) -> None:
        for folder in (
            self.folder,
            self.folder / "logs",
            *(self.folder / name for name in ("nginx", "redis", *PROXIES)),
        ):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _postgres_user():
            self.folder.chmod(0o711)  # that user passes through it to its own folder
        known = {**_read_toml(self.folder / "keys.toml"), **_read_toml(self.folder / "passwords.toml")}
        self.secrets = {**new_secrets(), **known}
        roles = {name: self.secrets[name] for name in KeySettings.model_fields}
        _write_private(self.folder / "keys.toml", _toml(roles))
        _write_private(
            self.folder / "passwords.toml",
            _toml({name: self.secrets[name] for name in self.secrets if name not in roles}),
        )
        _write_private(self.folder / "viewer-key", self.secrets["viewer"])

    def _note_processes(self) -> None:
        pids = {name: child.process.pid for name, child in self.children.items() if child.process is not None}
        running = {name: (pid, _began(pid)) for name, pid in pids.items()}
        _write_private(self._processes, json.dumps(running))

    def _end_leftovers(self) -> None:
        """Ends what an `up` that was killed has left running."""
        if not self._processes.exists():
            return
        for pid, began in reversed(json.loads(self._processes.read_text()).values()):
            if began and _began(pid) == began:  # else the number is another process's by now
                os.kill(pid, signal.SIGINT)
                _wait_for_end(pid)
        self._processes.unlink()

    # Services

    def _services(self) -> dict[str, Callable[[str], None]]:
        """What is started, in this order."""
        services: dict[str, Callable[[str], None]] = {"postgres": self._start_postgres}
        if self.options.redis:
            services["redis"] = self._start_redis
        if self.options.config is None:
            services["engine"] = self._start_engine
        services |= dict.fromkeys(PROXIES, self._start_proxy)
        services["nginx"] = self._start_nginx
        if find("prometheus"):
            services["prometheus"] = self._start_prometheus
        return services

    def _child(
        self, name: str, command: list[str], *, env: Mapping[str, str] | None = None, **options: object
    ) -> Child:
        child = Child(name, command, self.folder / "logs" / f"{name}.log", env or {}, **options)  # type: ignore[arg-type]
        self.children[name] = child
        child.start()
        return child

    def _start_postgres(self, name: str) -> None:
        user, home = _postgres_user(), self.folder / "postgres"
        password = self.secrets["superuser_password"]
        if not (home / "PG_VERSION").exists():
            home.mkdir(mode=0o700, exist_ok=True)  # it may be a disk of its own
            for path in home.iterdir():  # an earlier start was cut off here
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            given = self.folder / "superuser"
            _write_private(given, password)
            if user:
                for path in (home, given):
                    os.chown(path, pwd.getpwnam(user).pw_uid, -1)
            secure = ["-A", "scram-sha-256", "-U", "postgres", f"--pwfile={given}"]
            command = [program("initdb"), "-D", str(home), *secure]
            done = subprocess.run(command, user=user, cwd="/", capture_output=True, text=True, check=False)
            if done.returncode:
                raise ConfigError(f"initdb ended with {done.returncode}: {(done.stderr or done.stdout).strip()[-500:]}")
            given.unlink()
        port = self.layout.port("postgres")
        listen = ["-c", f"port={port}", "-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories="]
        command = [program("postgres"), "-D", str(home), *listen, *postgres_arguments()]
        # SIGINT is Postgres's fast shutdown: SIGTERM waits for its clients.
        child = self._child(name, command, user=user, stop_signal=signal.SIGINT)
        self._until(child, lambda: self._psql("SELECT 1") is not None)
        if self._psql("SELECT 1 FROM pg_database WHERE datname = 'rolltap'") != "1":
            named = "".join(f"\\set {one} {self.secrets[one]}\n" for one in ("store_password", "dump_password"))
            if self._psql(named + ROLES.read_text(encoding="utf-8")) is None:
                raise ConfigError(f"the database could not be made; see {child.log}")

    def _psql(self, script: str) -> str | None:
        """What the superuser's script prints; None if it fails."""
        command = [program("psql"), "-h", "127.0.0.1", "-p", str(self.layout.port("postgres")), "-U", "postgres"]
        command += ["-d", "postgres", "-v", "ON_ERROR_STOP=1", "-qAtX", "-f", "-"]
        env = {**os.environ, "PGPASSWORD": self.secrets["superuser_password"], "PGCONNECT_TIMEOUT": "5"}
        done = subprocess.run(command, input=script, env=env, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else None

    def _start_redis(self, name: str) -> None:
        home = self.folder / "redis"
        settings = {"port": str(self.layout.port("redis")), "bind": "127.0.0.1", "dir": str(home), **REDIS_SETTINGS}
        settings["requirepass"] = self.secrets["redis_password"]
        lines = "".join(f"{key} {json.dumps(value)}\n" for key, value in settings.items())
        _write_private(home / "redis.conf", lines)  # not on the command line, which every user of the machine sees
        child = self._child(name, [program("redis-server"), str(home / "redis.conf")])
        self._until(child, lambda: _listens(self.layout.port("redis")))

    def _start_engine(self, name: str) -> None:
        command = [sys.executable, "-m", "rolltap", "engine", "--port", str(self.layout.port("engine"))]
        if self.options.script is not None:
            command += ["--script", str(self.options.script)]
        child = self._child(name, command, env={"ROLLTAP_ENGINE_KEY": self.secrets["engine_password"]})
        self._until(child, lambda: _listens(self.layout.port("engine")))

    def _start_proxy(self, name: str) -> None:
        config = self.options.config
        if config is None:
            config = self.folder / "rolltap.toml"
            kind, model = ("rolltap", "tiny") if self.options.script is None else ("vllm", "scripted")
            text = policy_settings(self.layout, kind=kind, model=model, tokenizer=str(FOLDER))
            config.write_text(text, encoding="utf-8")
        command = [sys.executable, "-m", "rolltap", "serve", "--config", str(config)]
        child = self._child(name, command, env=self.proxy_environment(name))
        self._until(child, lambda: answers(f"{self.layout.url(f'{name}.admin')}/health") == 200)

    def _start_nginx(self, name: str) -> None:
        home = self.folder / "nginx"
        settings = nginx_settings(self._layout_of(name), pinned=self.options.pinned)
        (home / "rolltap.conf").write_text(settings, encoding="utf-8")
        user = "user root;" if os.geteuid() == 0 else ""
        (home / "nginx.conf").write_text(NGINX.format(folder=home, user=user), encoding="utf-8")
        command = [program("nginx"), "-p", str(home), "-c", str(home / "nginx.conf"), "-e", "stderr"]
        child = self._child(name, command)
        self._until(child, lambda: _listens(self.layout.port("nginx.admin")))

    def _start_prometheus(self, name: str) -> None:
        home = self.folder / "prometheus"
        home.mkdir(mode=0o700, exist_ok=True)
        settings = home / "prometheus.yaml"
        settings.write_text(prometheus_settings(self.layout), encoding="utf-8")
        listen = f"--web.listen-address={self.layout.addresses['prometheus']}"
        command = [program("prometheus"), f"--config.file={settings}", f"--storage.tsdb.path={home / 'data'}", listen]
        child = self._child(name, command)
        self._until(child, lambda: answers(f"{self.layout.url('prometheus')}/-/ready") == 200)

    # Waiting

    def _until(self, child: Child, ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + READY_S
        while not ready():
            if not child.alive:
                assert child.process is not None
                code = child.process.returncode
                raise ConfigError(f"{child.name} ended with {code}; the end of {child.log}:\n{child.tail()}")
            if time.monotonic() > deadline:
                raise ConfigError(f"{child.name} does not answer after {READY_S:g} s; see {child.log}")
            time.sleep(0.05)

    def _until_ready(self) -> None:
        """Until a call can be taken, through nginx."""
        url = f"{self.urls['admin']}/ready"
        deadline = time.monotonic() + READY_S
        while answers(url) != 200:
            self.look()
            if time.monotonic() > deadline:
                raise ConfigError(f"{url} says that no call can be taken; `rolltap doctor --server` says why")
            time.sleep(0.1)


PACKAGES = {"initdb": "postgresql", "psql": "postgresql", "redis-server": "redis-server", "nginx": "nginx-light"}
"""Debian's package of each program that must be there."""


def check(options: LocalOptions) -> None:
    """Raises one `ConfigError` with everything that is missing on this machine."""
    missing: list[str] = []
    needed = [name for name in PACKAGES if options.redis or name != "redis-server"]
    if packages := sorted({PACKAGES[name] for name in needed if not find(name)}):
        programs = ", ".join(name for name in needed if not find(name))
        missing.append(f"{programs} (Debian, Ubuntu: sudo apt-get install {' '.join(packages)})")
    for extra, modules in {"postgres": ("asyncpg", "alembic"), "redis": ("redis",)}.items():
        if any(importlib.util.find_spec(module) is None for module in modules) and (options.redis or extra != "redis"):
            missing.append(f"the driver ({install_line(extra)})")
    if options.config is None and options.script is None and importlib.util.find_spec("torch") is None:
        missing.append(f"torch for the embedded engine ({install_line('train')}), or a rolltap.toml with your engine")
    if missing:
        raise ConfigError("rolltap up --local needs " + "; ".join(missing))
    _check_places(options)


def _check_places(options: LocalOptions) -> None:
    """The folder is the deployment's own, and Postgres can reach it."""
    folder = options.folder.absolute()
    if (folder / "rolltap.db").exists():
        raise ConfigError(
            f"{folder} holds the SQLite store of `rolltap serve`: name another folder with --data, and bring the "
            "record there with `rolltap log export` and `rolltap log import`"
        )
    if user := _postgres_user():
        try:
            pwd.getpwnam(user)
        except KeyError:
            raise ConfigError(
                "Postgres does not run as root, and there is no user postgres: run this as another user"
            ) from None
        closed = [path for path in folder.parents if path.exists() and not path.stat().st_mode & 0o001]
        if closed:
            raise ConfigError(
                f"Postgres does not run as root, and its user can't pass {closed[0]}: name another folder with --data, "
                "or run this as another user"
            )


def find(name: str) -> str | None:
    """The path of a program. Debian keeps nginx where only root looks, and Postgres where nobody does."""
    folders = ["/usr/sbin", "/usr/local/sbin"]
    if name in ("initdb", "postgres", "psql"):
        versions = Path("/usr/lib/postgresql").glob("*/bin")
        newest = sorted(versions, key=lambda path: int(path.parent.name), reverse=True)
        return shutil.which(name, path=os.pathsep.join(map(str, newest))) or shutil.which(name)
    return shutil.which(name) or shutil.which(name, path=os.pathsep.join(folders))


def program(name: str) -> str:
    found = find(name)
    if found is None:
        raise ConfigError(f"{name} is not on this machine")
    return found


def answers(url: str) -> int:
    """The status that `url` is answered with; 0 if nothing answers."""
    try:
        with urllib.request.urlopen(url, timeout=5) as response:  # noqa: S310  our own address
            return response.status
    except urllib.error.HTTPError as error:
        return error.code
    except (urllib.error.URLError, OSError):
        return 0


def _kill_after(seconds: float, children: Iterable[Child]) -> None:
    """Waits so many seconds for all of them together; what still runs then is killed."""
    deadline = time.monotonic() + seconds
    for child in children:
        if not child.wait(max(0.1, deadline - time.monotonic())):
            child.kill()


def _postgres_user() -> str | None:
    """Postgres refuses to run as root: there it runs as the user that its package made."""
    return "postgres" if os.geteuid() == 0 else None


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _began(pid: int) -> int:
    """When the process began, in clock ticks since the machine did; 0 if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] == "Z" else int(fields[19])


def _wait_for_end(pid: int) -> None:
    deadline = time.monotonic() + STOP_S
    while _began(pid):
        if time.monotonic() > deadline:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            return
        time.sleep(0.05)


def _read_toml(path: Path) -> dict[str, str]:
    return tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _toml(values: Mapping[str, str]) -> str:
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items())


def _write_private(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    partial.touch(mode=0o600)
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


AT_ONCE_S = 5.0
"""A process that lived for longer is started again at once."""

LONGEST_PAUSE_S = 30.0


@dataclass(slots=True, eq=False)
class Child:
    """One process in a session of its own, so that a Ctrl-C in the terminal reaches only its parent.

    `user` is the account that it runs as, where this one is not to be used. `wanted`: it is started again when it ends.
    """

    name: str
    command: list[str]
    log: Path
    env: Mapping[str, str] = field(default_factory=dict)
    user: str | None = None
    stop_signal: signal.Signals = signal.SIGTERM
    wanted: bool = True
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    failures: int = 0  # ends within `AT_ONCE_S`, one after another
    again_at: float = 0.0  # on the monotonic clock; 0: it runs, or its end was not seen yet

    def start(self) -> None:
        """Its output is appended to `log`. Variables of rolltap's that this process has are not passed on."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("ROLLTAP_")}
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**inherited, **self.env},
                user=self.user,
                cwd="/" if self.user else None,  # this folder may be closed to that user
                start_new_session=True,
            )
        self.started_at, self.again_at = time.monotonic(), 0.0

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def look(self) -> str:
        """Starts it again where it has ended: at once if it had lived for a while, else after a pause that doubles.

        Returns what there is to tell, or "".
        """
        if not self.wanted or self.process is None or self.process.poll() is None:
            return ""
        now = time.monotonic()
        if self.again_at == 0.0:
            self.failures = self.failures + 1 if now < self.started_at + AT_ONCE_S else 0
            self.again_at = now + (min(LONGEST_PAUSE_S, 2.0 ** (self.failures - 1)) if self.failures else 0.0)
        if now < self.again_at:
            return ""
        code = self.process.returncode
        self.start()
        return f"{self.name} ended with {code} and is started again; its log: {self.log}"

    def signal(self, number: signal.Signals) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)

    def wait(self, within: float) -> bool:
        """Whether it ended within so many seconds. Then everything that it started is ended as well."""
        if self.process is None:
            return True
        try:
            self.process.wait(within)
        except subprocess.TimeoutExpired:
            return False
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        return True

    def kill(self) -> None:
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def tail(self, lines: int = 5) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
