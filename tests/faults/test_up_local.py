"""`rolltap up --local` as a user runs it: what dies is started again, and Ctrl-C leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import tomllib
from collections.abc import Mapping
from pathlib import Path
from subprocess import Popen

import pytest

from rolltap.engine.tiny import FOLDER
from rolltap.harnesses.client import AdminClient

from ..conftest import free_port, program
from ..integration.service import SCRIPT, rolltap
from .local import UPS, first_free_port, open_folder, processes_of


def processes(folder: Path) -> dict[str, int]:
    return {name: pid for name, (pid, _) in json.loads((folder / "processes.json").read_text()).items()}


async def started(folder: Path, *options: str) -> tuple[Popen[bytes], str]:
    """`up --local`, once it says where everything is: the process, and the admin plane's URL."""
    log = folder / "up.log"
    log.unlink(missing_ok=True)
    up = rolltap("up", "--local", "--data", str(folder / "data"), *options, env={}, log=log)
    UPS.append(up)
    async with asyncio.timeout(100):
        while "Ctrl-C stops everything" not in log.read_text():
            assert up.poll() is None, log.read_text()
            await asyncio.sleep(0.05)
    url = next(line.split()[1] for line in log.read_text().splitlines() if line.startswith("admin:"))
    return up, url


def dumped(data: Path) -> str:
    """A dump of the database by the role that docs/operating.md names."""
    passwords = tomllib.loads((data / "passwords.toml").read_text())
    settings = (data / "logs" / "postgres.log").read_text()
    port = re.findall(r"port (\d+)", settings)[0]
    command = [program("pg_dump"), "-h", "127.0.0.1", "-p", port, "-U", "rolltap_dump", "-d", "rolltap"]
    env = {**os.environ, "PGPASSWORD": passwords["dump_password"]}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout


def doctored(folder: Path, url: str) -> str:
    log = folder / "doctor.log"
    env = {"ROLLTAP_DATA": str(folder / "data"), "COLUMNS": "200"}
    rolltap("doctor", "--server", url, env=env, log=log).wait(60)
    return log.read_text()


async def test_what_dies_is_started_again_and_an_interrupt_ends_everything() -> None:
    """Takes about 15 CPU seconds: Postgres, Redis, nginx, an engine, two proxies, and most of them twice."""
    with open_folder() as folder:
        data = folder / "data"
        script = folder / "script.toml"
        script.write_text(SCRIPT)
        options = ("--script", str(script), "--port", str(first_free_port()))
        up, url = await started(folder, *options)
        keys = {line.split(" = ")[0]: line.split('"')[1] for line in (data / "keys.toml").read_text().splitlines()}
        async with AdminClient(url, keys["admin"]) as client:
            session = await client.open_session(ttl=600)
        assert session.endpoint.base_url.startswith(url.rpartition(":")[0])

        async with asyncio.timeout(60):  # it comes through Redis
            while session.session_id not in await asyncio.to_thread(dumped, data):  # noqa: ASYNC110
                await asyncio.sleep(0.2)
        examined = await asyncio.to_thread(doctored, folder, url)
        assert examined.count("rolltap 0.") == 2, examined  # both proxies, through nginx
        assert "proxies and workers on this store │ 2" in examined

        before = processes(data)
        os.kill(before["proxy-1"], signal.SIGKILL)
        async with asyncio.timeout(30):
            while processes(data)["proxy-1"] == before["proxy-1"]:  # noqa: ASYNC110  another process's event
                await asyncio.sleep(0.05)
        assert "proxy-1 ended with -9 and is started again" in (folder / "up.log").read_text()

        up.kill()  # what it started goes on without it
        await asyncio.to_thread(up.wait)
        assert processes_of(data)
        up, url = await started(folder, *options)
        async with AdminClient(url, keys["admin"]) as client:
            listed = await client.get("/read/sessions")
        assert [one["id"] for one in listed["sessions"]] == [session.session_id]
        up.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(up.wait, 110) == 0
        assert not processes_of(data)
        assert not (data / "processes.json").exists()


def refused(folder: Path, *options: str, env: Mapping[str, str] | None = None) -> str:
    """What `up --local` says when it does not start."""
    log = folder / "refused.log"
    up = rolltap("up", "--local", "--data", str(folder / "data"), *options, env=env or {}, log=log)
    assert up.wait(60) == 1
    return log.read_text()


def test_what_is_missing_is_named_with_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from rolltap.deployment import local
    from rolltap.errors import ConfigError

    with open_folder() as folder:
        options = local.LocalOptions(folder, script=FOLDER / "x.toml")
        monkeypatch.setattr(local, "find", lambda name: None)
        with pytest.raises(ConfigError) as error:
            local.check(options)
        assert "apt-get install nginx-light postgresql redis-server" in str(error.value)


def test_a_folder_with_another_store_and_taken_ports_are_refused() -> None:
    with open_folder() as folder:
        script = folder / "script.toml"
        script.write_text(SCRIPT)
        (folder / "data").mkdir()
        (folder / "data" / "rolltap.db").touch()
        assert "holds the SQLite store" in refused(folder, "--script", str(script))
        (folder / "data" / "rolltap.db").unlink()
        with socket.socket() as held:
            first = free_port()
            held.bind(("127.0.0.1", first))
            held.listen()
            assert f"something listens on {first} (nginx.agent)" in refused(
                folder, "--script", str(script), "--port", str(first)
            )
        assert not (folder / "data" / "keys.toml").exists()
