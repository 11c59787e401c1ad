"""Every mistake of an operator that we know of is said in one line: at the start, in `/ready`, in the log, or by
`rolltap doctor --server`. A row of a table each; servers are real.

Mistakes in settings and paths that need no server are in `tests/unit/cli/test_mistakes.py`.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import pytest
from redis import Redis
from typer.testing import CliRunner

from rolltap.cli.main import app
from rolltap.engine.tiny import FOLDER

from ..conftest import PostgresServer, RedisServer, free_port
from ..soak.disks import fill, mounted
from ..unit.proxy.test_tokenizer_check import altered
from .processes import EngineProcess, Forker, fake_clock

UP_WITHIN_S = 60.0
KEYS = {"admin": "admin-key", "trainer": "trainer-key", "secret": "0123456789abcdef"}
Settings = dict[str, dict[str, Any]]


@dataclass
class Site:
    """Where a row makes its mistake: a folder, private servers, and what a server's settings begin as."""

    folder: Path
    postgres: PostgresServer
    redis: RedisServer
    engine: str
    forker: Forker
    stack: ExitStack
    settings: Settings = field(default_factory=dict)
    prefix: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)

    def database(self, name: str) -> str:
        """The URL of a new database."""
        order(self.postgres.url(), f"DROP DATABASE IF EXISTS {name}", f"CREATE DATABASE {name}")
        return self.postgres.url(name)

    def redis_order(self, *words: str) -> None:
        with Redis.from_url(self.redis.url) as client:
            client.execute_command(*words)

    def serve(self, name: str = "own", **changes: Mapping[str, Any]) -> Server:
        """A server with these settings, and a folder and ports of its own, started."""
        ports = {f"{plane}_port": free_port() for plane in ("agent", "trainer", "admin")}
        settings: Settings = {
            "listen": ports,
            "store": {"spool_mb": 4},
            "keys": KEYS,
            "engines.main": {"url": self.engine},
            "policies.tiny": {"engine": "main", "model": "scripted", "tokenizer": str(FOLDER), "family": "qwen3"},
        }
        for section, values in {**self.settings, **changes}.items():
            settings[section] = {**settings.get(section, {}), **values}
        top = settings.pop("", {})
        top.setdefault("data", str(self.folder / name))
        config = self.folder / f"{name}.toml"
        config.write_text(toml({"": top, **settings}))
        server = Server(self, config, f"http://127.0.0.1:{settings['listen']['admin_port']}")
        self.stack.callback(server.kill)
        return server


class Server:
    """A `rolltap serve` in a process of its own: forked, or with a prefix or variables started from nothing."""

    def __init__(self, site: Site, config: Path, admin: str) -> None:
        self.admin, self.log = admin, config.with_suffix(".log")
        if site.prefix or site.environment:
            command = [*site.prefix, sys.executable, "-m", "rolltap", "serve", "--config", str(config)]
            with self.log.open("wb") as log:
                child = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **site.environment})
            self.pid, self._wait = child.pid, child.wait
        else:
            points = config.with_name(f"points-{len(list(config.parent.iterdir()))}")
            os.mkfifo(points)
            self.pid, self._wait = site.forker.fork(config, self.log, points), lambda: 0
        self._process = os.pidfd_open(self.pid)

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def ended(self, within: float = 0.0) -> bool:
        return bool(select.select([self._process], [], [], within)[0])

    def up(self) -> Server:
        until(lambda: "rolltap is up" in self.said or self.ended())
        assert not self.ended(), self.said
        return self

    def refused(self) -> str:
        """The last line of one that does not start. Nothing else but warnings comes before it."""
        assert self.ended(UP_WITHIN_S), self.said
        assert "Traceback" not in self.said
        return self.said.strip().splitlines()[-1]

    def ready(self) -> dict[str, str]:
        try:
            with urllib.request.urlopen(f"{self.admin}/ready", timeout=20) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as error:
            with error:
                return json.load(error)

    def doctor(self) -> str:
        environment = {"COLUMNS": "400", "ROLLTAP_ADMIN_KEY": KEYS["admin"]}
        return CliRunner().invoke(app, ["doctor", "--server", self.admin], env=environment).output

    def kill(self) -> None:
        if not self.ended():
            signal.pidfd_send_signal(self._process, signal.SIGKILL)
            self.ended(UP_WITHIN_S)
        self._wait()


def until(found: Callable[[], object]) -> None:
    deadline = time.monotonic() + UP_WITHIN_S
    while not found():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def toml(settings: Settings) -> str:
    lines = [f"{key} = {json.dumps(value)}" for key, value in settings.pop("").items()]
    for section, values in settings.items():
        lines += [f"[{section}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
    return "\n".join(lines) + "\n"


def order(url: str, *orders: str) -> None:
    async def run() -> None:
        connection = await asyncpg.connect(url)
        try:
            for each in orders:
                await connection.execute(each)
        finally:
            await connection.close()

    asyncio.run(run())


# The mistakes that keep a server from starting. Each gets a site, makes its mistake, and returns what is said.


def wrong_password(site: Site) -> str:
    url = urlsplit(site.database("locked"))
    order(site.postgres.url(), "DROP ROLE IF EXISTS mistaken", "CREATE ROLE mistaken LOGIN PASSWORD 'right'")
    rules = site.postgres.folder / "data" / "pg_hba.conf"
    before = rules.read_text()
    rules.write_text(f"host all mistaken 127.0.0.1/32 scram-sha-256\n{before}")
    order(site.postgres.url(), "SELECT pg_reload_conf()")
    site.settings["store"] = {"url": f"postgresql://mistaken:wr0ng@127.0.0.1:{url.port}/locked"}
    return r'mistaken:\*\*\*@127.0.0.1.*password authentication failed for user "mistaken"'


def no_such_database(site: Site) -> str:
    site.settings["store"] = {"url": site.postgres.url("nodb")}
    return 'database "nodb" does not exist'


def postgres_away(site: Site) -> str:
    site.settings["store"] = {"url": f"postgresql://rolltap@127.0.0.1:{free_port()}/x"}
    return "can't be reached"


def postgres_on_a_standby(site: Site) -> str:
    url = site.database("standby")
    order(url, "ALTER DATABASE standby SET default_transaction_read_only = on")
    site.settings["store"] = {"url": url}
    return "the server is read-only"


def forgetful_postgres(site: Site) -> str:
    url = site.database("forgetful")
    order(url, "ALTER DATABASE forgetful SET synchronous_commit = off")
    site.settings["store"] = {"url": url}
    return "synchronous_commit is off, which loses acknowledged calls; ALTER ROLE rolltap SET synchronous_commit = on"


def unknown_store(site: Site) -> str:
    site.settings["store"] = {"url": "postgres://127.0.0.1/x"}
    return "no store of kind 'postgres'; known: sqlite, postgresql; did you mean postgresql"


def redis_before_sqlite(site: Site) -> str:
    site.settings["store"] = {"ingest": site.redis.url}
    return "store.ingest: a Redis stream works with a Postgres store, not with sqlite"


def redis_setting(name: str, value: str) -> Callable[[Site], str]:
    def mistake(site: Site) -> str:
        site.redis_order("CONFIG", "SET", name, value)
        site.settings["store"] = {"url": site.database("ingests"), "ingest": site.redis.url}
        return f"can lose acknowledged calls; .*CONFIG SET {name} "

    mistake.__name__ = f"redis_with_{name}_{value}"
    return mistake


def redis_away(site: Site) -> str:
    site.settings["store"] = {"url": site.database("alone"), "ingest": f"redis://127.0.0.1:{free_port()}/0"}
    return "cannot use redis://127.0.0.1"


def two_stores_on_one_redis(site: Site) -> str:
    site.redis_order("SET", "rolltap:store", "another")
    site.settings["store"] = {"url": site.database("second"), "ingest": site.redis.url}
    return "is the ingest stream of another store.*DEL rolltap:store"


def read_only_data(site: Site) -> str:
    site.stack.enter_context(mounted({site.folder / "own": 8}))
    subprocess.run(["mount", "-o", "remount,ro", str(site.folder / "own")], check=True)
    return "own/.*Read-only file system"


def full_disk(site: Site) -> str:
    site.stack.enter_context(mounted({site.folder / "own": 8}))
    site.settings["store"] = {"spool_mb": 64, "url": site.database("filled")}
    return "cannot allocate the spool .*No space left on device"


def two_servers_with_one_data_folder(site: Site) -> str:
    other = site.serve("other").up()
    site.settings[""] = {"data": str(site.folder / "other")}
    return f"process {other.pid}"


def two_servers_with_one_sqlite_file(site: Site) -> str:
    site.settings["store"] = {"url": f"sqlite:///{site.folder}/shared.db"}
    other = site.serve("other").up()
    return f"shared.db is open for writing in process {other.pid}; .*use Postgres"


def workers_on_one_spool(site: Site) -> str:
    """A copied command line with another `data`, whose spool is a link to the first one's."""
    site.settings["store"] = {"url": site.database("spools")}
    site.serve("other").up()
    (site.folder / "own").mkdir()
    (site.folder / "own" / "spool").symlink_to(site.folder / "other" / "spool")
    return "another process uses the spool .*give each process its own `data` folder"


def other_secret(site: Site) -> str:
    site.settings["store"] = {"url": site.database("secrets")}
    site.serve("other").up()
    site.settings["keys"] = {"secret": "another-secret-01"}
    return "another proxy on .* has a different keys.secret"


def port_taken(site: Site) -> str:
    taken = site.stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    site.settings["listen"] = {"admin_port": taken.getsockname()[1]}
    return "can't listen on 127.0.0.1:"


def engine_typo(site: Site) -> str:
    site.settings["policies.tiny"] = {"engine": "mian"}
    return "no engine 'mian'; known: main"


def record_of_another_tokenizer(site: Site) -> str:
    site.serve("own").up().kill()
    site.settings["policies.tiny"] = {"tokenizer": str(altered(site.folder / "tokenizer", "ordinary"))}
    return "tokenizer"


STOPS = (
    wrong_password, no_such_database, postgres_away, postgres_on_a_standby, forgetful_postgres, unknown_store,
    redis_before_sqlite, *(redis_setting("maxmemory-policy", each) for each in ("allkeys-lru", "volatile-lru")),
    redis_setting("appendonly", "no"), redis_setting("appendfsync", "everysec"), redis_away, two_stores_on_one_redis,
    read_only_data, full_disk, two_servers_with_one_data_folder, two_servers_with_one_sqlite_file, workers_on_one_spool,
    other_secret, port_taken, engine_typo, record_of_another_tokenizer,
)  # fmt: skip


# The mistakes with which a server runs. Each returns what `/ready` says, and words of the log or of the doctor.


def clock_off(site: Site) -> tuple[dict[str, str], str, str]:
    site.settings["store"] = {"url": site.database("clocks")}
    site.environment = fake_clock(clock := site.folder / "clock")
    clock.write_text("+10800")
    return {"clock": "off"}, r"this machine's clock is \+10[78]\d\d", r"set this machine's clock \(NTP\)"


def engine_away(site: Site) -> tuple[dict[str, str], str, str]:
    site.settings["engines.main"] = {"url": f"http://127.0.0.1:{free_port()}"}
    return {"engines": "down"}, "engine main is not up", "start the engine, or correct engines"


def model_that_the_engine_lacks(site: Site) -> tuple[dict[str, str], str, str]:
    site.settings["policies.tiny"] = {"model": "qwen"}
    return {"models": "missing"}, "serves no model 'qwen'", "correct policies"


def engine_with_another_tokenizer(site: Site) -> tuple[dict[str, str], str, str]:
    site.settings["policies.tiny"] = {"tokenizer": str(altered(site.folder / "tokenizer", "added"))}
    return {"tokenizers": "differ"}, "another tokenizer than the policy's", "calls are refused"


def other_keys(site: Site) -> tuple[dict[str, str], str, str]:
    site.settings["store"] = {"url": site.database("keys")}
    site.serve("other", keys={"trainer": "another-key"}).up()
    return {"proxies": "differ"}, "has different keys", r"give all proxies the same \[keys\]"


def one_more_policy_on_one_proxy(site: Site) -> tuple[dict[str, str], str, str]:
    site.settings["store"] = {"url": site.database("policies")}
    policy = {"engine": "main", "model": "scripted", "tokenizer": str(FOLDER), "family": "qwen3"}
    site.serve("other", **{"policies.more": policy}).up()
    return {"proxies": "differ"}, "has other policies", r"give all proxies the same \[policies\]"


def too_many_connections(site: Site) -> tuple[dict[str, str], str, str]:
    site.settings["store"] = {"url": site.database("crowded"), "connections": 99}
    words = r"the server allows 97 connections .*, and this process may open 99"
    return {"store": "ok"}, words, "raise max_connections .*or set store.connections = "


def role_with_few_connections(site: Site) -> tuple[dict[str, str], str, str]:
    url = urlsplit(site.database("few"))
    order(site.postgres.url(), "DROP ROLE IF EXISTS few", "CREATE ROLE few LOGIN CONNECTION LIMIT 12")
    order(site.postgres.url(), "ALTER DATABASE few OWNER TO few")
    site.settings["store"] = {"url": url._replace(netloc=f"few@127.0.0.1:{url.port}").geturl()}
    words = r"the server allows 12 connections .*, and this process may open 30"
    return {"store": "ok"}, words, "raise max_connections .*or set store.connections = "


def few_descriptors(site: Site) -> tuple[dict[str, str], str, str]:
    site.prefix = ("prlimit", "--nofile=200:200")
    return {"store": "ok"}, "may open 200 files", "raise the limit: LimitNOFILE"


def spool_in_memory(site: Site) -> tuple[dict[str, str], str, str]:
    site.stack.enter_context(mounted({site.folder / "own": 64}))
    return {"store": "ok"}, "", "put `data` on a disk"


RUNS = (
    clock_off, engine_away, model_that_the_engine_lacks, engine_with_another_tokenizer, other_keys,
    one_more_policy_on_one_proxy, too_many_connections, role_with_few_connections, few_descriptors, spool_in_memory,
)  # fmt: skip


@pytest.fixture(scope="module")
def world() -> Iterator[tuple[PostgresServer, EngineProcess, Forker]]:
    postgres, engine, forker = PostgresServer(durable=False), EngineProcess(), Forker()
    postgres.start()
    yield postgres, engine, forker
    forker.close()
    engine.close()
    postgres.remove()


@pytest.fixture
def site(tmp_path: Path, world: tuple[PostgresServer, EngineProcess, Forker]) -> Iterator[Site]:
    postgres, engine, forker = world
    redis = RedisServer()
    redis.start()
    with ExitStack() as stack:
        stack.callback(redis.remove)
        yield Site(tmp_path, postgres, redis, engine.url, forker, stack)


@pytest.mark.parametrize("mistake", STOPS, ids=lambda mistake: mistake.__name__)
def test_a_mistake_that_keeps_a_server_from_starting_is_one_line(mistake: Callable[[Site], str], site: Site) -> None:
    words = mistake(site)
    line = site.serve().refused()
    assert re.search(words, line), line
    assert "wr0ng" not in line


@pytest.mark.parametrize("mistake", RUNS, ids=lambda mistake: mistake.__name__)
def test_a_mistake_with_which_a_server_runs_is_said_by_it(
    mistake: Callable[[Site], tuple[dict[str, str], str, str]], site: Site
) -> None:
    ready, logged, advised = mistake(site)
    server = site.serve().up()
    until(lambda: ready.items() <= server.ready().items())
    until(lambda: re.search(logged, server.said))
    said = server.doctor()
    assert re.search(advised, said), said


def test_a_disk_that_fills_up_is_said_with_its_folder(site: Site) -> None:
    site.stack.enter_context(mounted({site.folder / "own": 64}))
    server = site.serve().up()
    fill(site.folder / "own")
    opening = urllib.request.Request(
        f"{server.admin}/sessions", data=b"{}", headers={"authorization": f"Bearer {KEYS['admin']}"}, method="POST"
    )

    def is_away() -> bool:
        with suppress(urllib.error.HTTPError), urllib.request.urlopen(opening, timeout=20):
            pass
        return server.ready()["store"] != "ok"

    until(is_away)
    said = server.doctor()
    folder = site.folder / "own"
    assert re.search(f"^store: the disk of {folder} is full: make room there", said, re.MULTILINE), said
    assert re.search(f"disk of the spool +│ the disk of {folder} is full", said), said
    assert "room for the spool and the index" in said
    assert "Errno" not in said
