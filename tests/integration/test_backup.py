"""`rolltap log backup`: a copy of the whole store, taken while the server writes, that is sound and can be served."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path

import aiohttp
from typer.testing import CliRunner

import rolltap
from rolltap.cli.main import app
from rolltap.contract.admin import FinishRollout, NewReward
from rolltap.engine.scripted import say
from rolltap.harnesses.client import ClaimedRollout
from rolltap.types import RolloutStatus, Task

from ..harnesses.house import POLICY, House, house


async def ask(home: House, http: aiohttp.ClientSession, key: str) -> None:
    body = {"model": POLICY, "messages": [{"role": "user", "content": "Hi."}]}
    headers = {"Authorization": f"Bearer {key}"}
    async with http.post(f"{home.urls['agent']}/v1/chat/completions", json=body, headers=headers) as response:
        assert response.status == 200


async def log(*arguments: str) -> str:
    result = await asyncio.to_thread(CliRunner().invoke, app, ["log", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


async def test_a_copy_beside_a_running_server_holds_groups_and_rewards(tmp_path: Path) -> None:
    copy = tmp_path / "copy" / "rolltap.db"
    copy.parent.mkdir()
    async with house(say("Hello."), tmp_path) as home, aiohttp.ClientSession() as http:
        group = await home.client.open_group(Task("t", "Look."), policy=POLICY, n=1)
        opened = await home.client.start_rollout(ClaimedRollout(group.rollout_ids[0]), ttl=60)
        await ask(home, http, opened.endpoint.key)
        await home.client.reward(NewReward(group.rollout_ids[0], 0.5))
        await home.client.finish_rollout(group.rollout_ids[0], FinishRollout(RolloutStatus.SUCCEEDED, opened.attempt))
        session = await home.open()
        store = home.app.settings.store_url
        backup = asyncio.create_task(log("backup", str(copy), "--store", store))
        while not backup.done():
            await ask(home, http, session.endpoint.key)
        await backup
        again = await asyncio.to_thread(CliRunner().invoke, app, ["log", "backup", str(copy), "--store", store])
        assert (again.exit_code, "choose another name" in again.output) == (1, True)
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    assert [path.name for path in copy.parent.iterdir()] == ["rolltap.db"]
    assert "all sound" in await log("verify", "--store", f"sqlite:///{copy}")
    async with rolltap.open_async(copy) as record:
        (rollout,) = await record.rollouts().rows()
        assert (rollout.rollout.id, rollout.reward) == (group.rollout_ids[0], 0.5)
    (tmp_path / "other" / "data").mkdir(parents=True)
    copy.rename(tmp_path / "other" / "data" / "rolltap.db")  # as one restores it
    async with house(say("Hello."), tmp_path / "other") as restored, aiohttp.ClientSession() as http:
        (detail,) = (await restored.client.get(f"/read/groups/{group.id}"))["rollouts"]
        assert detail["rollout"]["rewards"][0]["value"] == 0.5
        await ask(restored, http, session.endpoint.key)  # its key is on record, too


async def test_a_postgres_store_is_left_to_its_own_tool(tmp_path: Path) -> None:
    url = "postgresql://nobody@127.0.0.1:9/none"
    result = await asyncio.to_thread(CliRunner().invoke, app, ["log", "backup", str(tmp_path / "x"), "--store", url])
    assert (result.exit_code, "pg_dump" in result.output) == (1, True)
