"""What is kept on disk is its owner's, and what is said of a request has an end."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import httpx
import pytest

from rolltap.engine.vllm_http import keyed
from rolltap.errors import MAX_MESSAGE, ConfigError, InvalidRequest
from rolltap.proxy.app import Rolltap
from rolltap.settings import Settings


@pytest.fixture(autouse=True)
def usual_umask():
    former = os.umask(0o022)
    yield
    os.umask(former)


def settings(folder: Path) -> Settings:
    engines = {"up": {"kind": "openai_compatible", "url": "http://127.0.0.1:9"}}
    return Settings.model_validate({"data": folder, "engines": engines, "policies": {"p": {"engine": "up"}}})


def others_bits(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode) & 0o077


@pytest.mark.parametrize("old", [False, True])
async def test_nobody_else_reads_the_data_folder(tmp_path: Path, old: bool) -> None:
    data = tmp_path / "data"
    if old:  # a database of an earlier release
        data.mkdir(mode=0o700)
        (data / "rolltap.db").touch(mode=0o644)
    async with Rolltap.running(settings(data)) as app:
        await app.services.sessions.open()
        made = {path.name: others_bits(path) for path in [data, *data.rglob("*")]}
    assert {"rolltap.db", "rolltap.db-wal", "keys.toml", "spool"} <= set(made)
    assert not any(made.values()), made


async def test_the_planes_describe_themselves_to_nobody(tmp_path: Path) -> None:
    async with Rolltap.running(settings(tmp_path)) as app:
        for plane in ("admin", "trainer"):
            transport = httpx.ASGITransport(app.planes[plane])
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
                for path in ("/docs", "/openapi.json", "/redoc", "/health/"):
                    assert (await client.get(path)).status_code == 404


def test_an_errors_message_has_an_end() -> None:
    error = InvalidRequest("x" * 3_000_000, param="y" * 3_000_000)
    assert (len(error.message), len(str(error))) == (MAX_MESSAGE, MAX_MESSAGE)
    assert len(error.param or "") < 1000


async def ok(scope: object, receive: object, send: object) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})  # type: ignore[operator]
    await send({"type": "http.response.body", "body": b""})  # type: ignore[operator]


@pytest.mark.parametrize(("sent", "status"), [("", 401), ("Bearer wrong", 401), ("Bearer " + "k" * 16, 200)])
async def test_an_engine_with_a_key_wants_it(sent: str, status: int) -> None:
    transport = httpx.ASGITransport(keyed(ok, "0.0.0.0", "k" * 16))
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
        assert (await client.post("/pause", headers={"authorization": sent})).status_code == status


@pytest.mark.parametrize("key", ["", "short"])
def test_an_engine_off_loopback_needs_a_key(key: str) -> None:
    with pytest.raises(ConfigError, match="key"):
        keyed(ok, "0.0.0.0", key)
    assert keyed(ok, "127.0.0.1", "") is ok
