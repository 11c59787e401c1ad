"""What a server finds out about itself, and what `rolltap doctor --server` makes of several answers."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from rolltap.calllog.stats import PostgresFacts
from rolltap.cli.doctor import differences
from rolltap.contract.admin import Diagnosis, Finding
from rolltap.engine.scripted import ScriptedEngine, say
from rolltap.engine.tiny import FOLDER
from rolltap.proxy import diagnosis
from rolltap.proxy.app import Rolltap
from rolltap.settings import Settings
from rolltap.types import Task

Findings = Mapping[str, Mapping[str, Any]]


def settings_of(data: Path, engine: str, **store: Any) -> Settings:
    policy = {"engine": "main", "model": "scripted", "tokenizer": str(FOLDER)}
    return Settings.model_validate(
        {"data": data, "store": store, "engines": {"main": {"kind": "vllm", "url": engine}}, "policies": {"p": policy}}
    )


async def diagnose(app: Rolltap) -> Findings:
    key = {"authorization": f"Bearer {app.settings.keys.viewer}"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app.planes["admin"]), base_url="http://admin") as admin:
        response = await admin.get("/diagnosis", headers=key)
    assert response.status_code == 200, response.text
    return {finding["what"]: finding for finding in response.json()["findings"]}


def indexes(folder: Path) -> list[Path]:
    return list(folder.glob("*.index"))


async def test_a_server_that_is_well_has_nothing_to_advise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "DISHONEST_S", 0.0)
    monkeypatch.setattr(diagnosis, "IN_MEMORY", frozenset())  # where the tests run, /tmp may be memory
    monkeypatch.setattr(diagnosis, "FEW_DESCRIPTORS", 1)
    monkeypatch.setattr(diagnosis, "LITTLE_ROOM", 1)
    async with ScriptedEngine(say("yes"), FOLDER) as engine, Rolltap.running(settings_of(tmp_path, engine.url)) as app:
        found = await diagnose(app)
    assert {what for what, each in found.items() if not each["healthy"] or each["advice"]} == set()
    assert found["policy p"]["state"] == "version 0 on main"
    assert {"store", "file descriptors", "disk of the spool", "room for the spool and the index"} <= found.keys()


async def test_what_is_wrong_with_a_policy_and_what_waits_is_said(tmp_path: Path) -> None:
    async with ScriptedEngine(say("yes"), FOLDER) as engine, Rolltap.running(settings_of(tmp_path, engine.url)) as app:
        policy = app.policies["p"]
        policy.wrong_weights = "engine main serves its base weights, and the policy is at version 3"
        assert "base weights" in (await diagnose(app))["policy p"]["advice"]
        policy.wrong_tokenizer = "the engine's tokenizer differs at <a>"
        assert "differs at <a>" in (await diagnose(app))["policy p"]["advice"]
        policy.up = False
        found = await diagnose(app)
        assert "does not answer" in found["policy p"]["state"]
        assert not found["policy p"]["healthy"]


async def test_connections_that_postgres_cannot_give_are_said_with_the_setting(
    tmp_path: Path, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def few(database: Any) -> PostgresFacts:
        return PostgresFacts("15", most=30, reserved=3, open=20, role_limit=-1, is_durable=False, is_standby=False)

    settings = settings_of(tmp_path, "http://127.0.0.1:9", url=postgres_url)
    async with Rolltap.running(settings) as app:
        found = await diagnose(app)
        assert found["connections"]["healthy"], found["connections"]
        assert found["proxies and workers on this store"]["state"] == "1"
        key = {"authorization": f"Bearer {app.settings.keys.viewer}"}
        transport = httpx.ASGITransport(app.planes["admin"])
        async with httpx.AsyncClient(transport=transport, base_url="http://admin") as admin:
            assert (await admin.get("/read/sessions", headers=key)).status_code == 200
        assert indexes(tmp_path), "the index of a Postgres store lies under `data`"
        monkeypatch.setattr(diagnosis, "postgres_facts", few)
        found = await diagnose(app)
    assert "store.connections = 17" in found["connections"]["advice"]
    assert "loses acknowledged calls" in found["Postgres"]["advice"]


async def test_the_redis_is_asked_for_its_settings(tmp_path: Path, postgres_url: str, redis_url: str) -> None:
    from redis.asyncio import Redis

    settings = settings_of(tmp_path, "http://127.0.0.1:9", url=postgres_url, ingest=redis_url)
    async with Rolltap.running(settings) as app, Redis.from_url(redis_url) as redis:
        assert (await diagnose(app))["Redis"]["healthy"]
        await redis.config_set("appendfsync", "everysec")
        try:
            found = (await diagnose(app))["Redis"]
        finally:
            await redis.config_set("appendfsync", "always")
    assert "CONFIG SET appendfsync always" in found["advice"]


def test_too_few_descriptors_are_said_with_the_way_to_more(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    diagnosis.warn_of_few_descriptors()
    assert not caplog.text
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (64, 4096))
    diagnosis.warn_of_few_descriptors()
    assert "may open 64 files" in caplog.text
    assert "ulimit -n 4096" in caplog.text
    monkeypatch.setattr("os.listdir", lambda path: ["0"] * 60)
    found = diagnosis.descriptors()
    assert (found.state, found.healthy) == ("60 of 64", False)
    assert "LimitNOFILE" in found.advice


def test_a_disk_without_room_and_one_that_is_memory_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert diagnosis.room_at("room", tmp_path / "not" / "there", needed=1).healthy
    assert not diagnosis.room_at("room", tmp_path, needed=1 << 60).healthy
    monkeypatch.setattr(diagnosis, "file_system_of", lambda folder: "tmpfs")
    assert "put `data` on a disk" in diagnosis.honesty_of(tmp_path).advice
    monkeypatch.setattr(diagnosis, "file_system_of", lambda folder: "nfs4")
    assert "put `data` on a local disk" in diagnosis.honesty_of(tmp_path).advice


def test_servers_that_differ_are_named() -> None:
    def of(host: str, version: str, *policies: str) -> Diagnosis:
        return Diagnosis(version, 1, host, policies, [Finding("store", "x")])

    assert differences([of("a", "0.2.0", "p"), of("b", "0.2.0", "p")]) == []
    found = differences([of("a", "0.2.0", "p", "q"), of("b", "0.3.0", "p")])
    assert [(each.what, each.healthy) for each in found] == [("versions", True), ("policies", False)]
    assert "q is not on b (process 1)" in found[1].state


async def test_a_queue_without_nodes_is_said(tmp_path: Path) -> None:
    async with ScriptedEngine(say("yes"), FOLDER) as engine, Rolltap.running(settings_of(tmp_path, engine.url)) as app:
        body = {"policy": "p", "n": 1, "tasks": [{"id": Task("t", "do").id, "instruction": "do"}]}
        key = {"authorization": f"Bearer {app.settings.keys.admin}"}
        transport = httpx.ASGITransport(app.planes["admin"])
        async with httpx.AsyncClient(transport=transport, base_url="http://admin", headers=key) as admin:
            assert (await admin.post("/tasks", json=body)).status_code == 200
        assert "start `rolltap node`" in (await diagnose(app))["tasks"]["advice"]
