"""Engines that come back with other weights than the policy's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from rolltap.engine.scripted import ScriptedEngine, say
from rolltap.engine.scripted.weights import digest_of_files
from rolltap.engine.tiny import FOLDER
from rolltap.ledger.schema import version_digests
from rolltap.proxy.app import Rolltap
from rolltap.proxy.call.engine_watch import watch_weights
from rolltap.settings import Settings


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rolltap.proxy.call.engine_watch.CHECK_EVERY_S", 0.02)
    monkeypatch.setattr("rolltap.proxy.engines.pool.PROBE_EVERY_S", 0.02)


@pytest.fixture
async def engines() -> AsyncIterator[list[ScriptedEngine]]:
    started = [ScriptedEngine(say("yes"), FOLDER, wire="vllm") for _ in range(2)]
    async with started[0], started[1]:
        yield started


def settings_of(folder: Path, *engines: ScriptedEngine) -> Settings:
    engine = {"kind": "vllm", "url": ",".join(engine.url for engine in engines)}
    policy = {"engine": "main", "model": "scripted", "tokenizer": str(FOLDER)}
    return Settings.model_validate({"data": folder, "engines": {"main": engine}, "policies": {"p": policy}})


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110  the state is another task's
            await asyncio.sleep(0.01)


async def push(app: Rolltap, version: int, folder: str, digest: str = "") -> None:
    """As a trainer pushes; without a folder as it records what it has sent."""
    policy = app.policies["p"]
    if digest:
        row = version_digests.insert().values(policy="p", version=version, digest=digest)
        await app.call_log.database.transact(lambda connection: connection.execute(row))
    await policy.engine.load_weights(folder or "/sent", version)
    await app.ledger.policies.set_version("p", version, folder)
    policy.version = version


async def status_of_call(app: Rolltap) -> int:
    body = {"model": "p", "messages": [{"role": "user", "content": "up?"}]}
    key = {"authorization": f"Bearer {app.settings.keys.project}"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app.planes["agent"]), base_url="http://agent") as agent:
        return (await agent.post("/v1/chat/completions", json=body, headers=key)).status_code


@pytest.mark.parametrize("replicas", [1, 2])
async def test_a_restarted_engine_gets_the_policys_weights_again(
    engines: list[ScriptedEngine], tmp_path: Path, caplog: pytest.LogCaptureFixture, replicas: int
) -> None:
    async with Rolltap.running(settings_of(tmp_path, *engines[:replicas])) as app:
        await push(app, 3, "/weights/3")
        engines[0].model.weights.version = "default"
        await until(lambda: engines[0].model.weights.version == "3")
        await until(lambda: not app.policies["p"].wrong_weights)
        assert await status_of_call(app) == 200
    assert "serves its base weights, and the policy is at version 3" in caplog.text
    assert "loaded again from /weights/3" in caplog.text


async def test_a_server_that_starts_beside_a_replaced_engine_gives_it_the_weights(
    engines: list[ScriptedEngine], tmp_path: Path
) -> None:
    async with Rolltap.running(settings_of(tmp_path, engines[0])) as app:
        await push(app, 3, "/weights/3")
    engines[0].model.weights.version = "2"
    async with Rolltap.running(settings_of(tmp_path, engines[0])) as app:
        await until(lambda: engines[0].model.weights.version == "3")


@pytest.mark.parametrize("replicas", [1, 2])
async def test_weights_that_no_folder_has_pause_the_policy_in_words_until_a_push(
    engines: list[ScriptedEngine], tmp_path: Path, replicas: int
) -> None:
    async with Rolltap.running(settings_of(tmp_path, *engines[:replicas])) as app:
        await push(app, 3, "")
        await app.ledger.policies.set_version("p", 3)
        if replicas == 2:
            app.policies["p"].engine.replicas.folder = None  # type: ignore[attr-defined]
        for engine in engines[:replicas]:
            engine.model.weights.version = "default"
        await until(lambda: "trainer must push them again" in app.policies["p"].wrong_weights)
        assert await status_of_call(app) == 503
        await push(app, 4, "/weights/4")
        await until(lambda: not app.policies["p"].wrong_weights)
        assert await status_of_call(app) == 200


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"of version 3")
    return folder


@pytest.mark.parametrize("replicas", [1, 2])
async def test_an_overwritten_folder_is_not_served_as_the_version_that_it_had(
    engines: list[ScriptedEngine], tmp_path: Path, folder: Path, replicas: int
) -> None:
    async with Rolltap.running(settings_of(tmp_path, *engines[:replicas])) as app:
        policy = app.policies["p"]
        await push(app, 3, str(folder), digest_of_files(str(folder)))
        await until(lambda: policy.digest != "")
        (folder / "model.safetensors").write_bytes(b"of the next one")
        for engine in engines[:replicas]:
            engine.model.weights.version = "default"
        await until(lambda: f"{folder} has other weights now than version 3" in policy.wrong_weights)
        assert await status_of_call(app) == 503
        (folder / "model.safetensors").write_bytes(b"of version 3")
        await until(lambda: not policy.wrong_weights)
        assert await status_of_call(app) == 200


@pytest.mark.parametrize("replicas", [1, 2])
async def test_other_weights_under_the_same_version_are_replaced(
    engines: list[ScriptedEngine], tmp_path: Path, folder: Path, replicas: int
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "model.safetensors").write_bytes(b"somebody's")
    async with Rolltap.running(settings_of(tmp_path, *engines[:replicas])) as app:
        await push(app, 3, str(folder), digest_of_files(str(folder)))
        await until(lambda: app.policies["p"].digest != "")
        engines[0].model.weights.load(str(other))
        await until(lambda: engines[0].model.weights.path == str(folder))
        await until(lambda: not app.policies["p"].wrong_weights)
        assert await status_of_call(app) == 200


async def test_a_digest_that_a_trainer_makes_otherwise_is_compared_with_nothing(
    engines: list[ScriptedEngine], tmp_path: Path, folder: Path
) -> None:
    async with Rolltap.running(settings_of(tmp_path, engines[0])) as app:
        await push(app, 3, str(folder), "a trainer's own name")
        await asyncio.sleep(0.2)
        assert not app.policies["p"].wrong_weights
        assert engines[0].model.weights.loads == 1


async def test_an_update_under_way_is_left_alone(engines: list[ScriptedEngine], tmp_path: Path) -> None:
    async with Rolltap.running(settings_of(tmp_path, engines[0])) as app:
        await push(app, 3, "/weights/3")
        await app.ledger.policies.set_paused("p", "keep")
        engines[0].model.weights.version = "4"
        await asyncio.sleep(0.2)
        assert engines[0].model.weights.version == "4"
        assert not app.policies["p"].wrong_weights


async def test_an_engine_that_does_not_answer_delays_no_other() -> None:
    """Nor does a check that raises: it is tried again."""
    checked: list[str] = []

    class Check:
        async def check(self, policy: SimpleNamespace) -> None:
            checked.append(policy.name)
            if policy.name == "silent":
                await asyncio.Event().wait()
            if policy.name == "broken":
                raise RuntimeError

    policies: Any = [SimpleNamespace(name=name) for name in ("silent", "broken", "sound")]
    check: Any = Check()
    watching = asyncio.create_task(watch_weights(check, policies))
    await until(lambda: checked.count("sound") > 2 and checked.count("broken") > 2)
    watching.cancel()
    assert checked.count("silent") == 1
