"""Forks over HTTP: a session and a rollout continue a call of another one; pages and the command show where."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from typer.testing import CliRunner

from rolltap.cli.main import app
from rolltap.contract.admin import NewReward
from rolltap.contract.trainer import LeaseRequest
from rolltap.engine.scripted import Script, ScriptedReply
from rolltap.errors import RolltapError
from rolltap.types import Task

from ..harnesses.house import POLICY, House, house

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def home(tmp_path: Path) -> AsyncIterator[House]:
    async with house(Script(otherwise=ScriptedReply(say="Hello there.")), tmp_path) as home:
        yield home


async def ask(key: dict[str, Any], messages: list[dict[str, Any]]) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {key['key']}"}
    async with (
        aiohttp.ClientSession(headers=headers) as http,
        http.post(f"{key['base_url']}/v1/chat/completions", json={"model": POLICY, "messages": messages}) as reply,
    ):
        assert reply.status == 200, await reply.text()
        return (await reply.json())["choices"][0]["message"]


async def post(home: House, path: str, body: dict[str, Any], status: int = 200) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {home.app.settings.keys.admin}"}
    url = f"{home.urls['admin']}{path}"
    async with aiohttp.ClientSession(headers=headers) as http, http.post(url, json=body) as reply:
        assert reply.status == status, await reply.text()
        return await reply.json()


async def page(home: House, path: str) -> str:
    headers = {"Authorization": f"Bearer {home.app.settings.keys.admin}"}
    async with aiohttp.ClientSession(headers=headers) as http, http.get(f"{home.urls['admin']}{path}") as reply:
        assert reply.status == 200, await reply.text()
        return await reply.text()


async def test_a_forked_session_shows_where_it_begins_and_counts_only_its_own_tokens(home: House) -> None:
    first = await post(home, "/sessions", {"policy": POLICY, "tags": {"harness": "mine"}})
    await ask(first, HI)
    (row,) = await home.app.services.call_log.rows(first["session_id"])
    path = f"/sessions/{first['session_id']}/fork"
    fork = await post(home, path, {"call": row.intent.id, "at": 1})
    await ask(fork, HI)
    again = await post(home, "/sessions", {"replay": fork["session_id"]})
    await ask(again, HI)
    calls = await home.app.services.call_log.calls([fork["session_id"], again["session_id"]])
    own = [recorded[-1] for _, recorded in calls.values()]
    assert own[0].output_ids.tolist() == own[1].output_ids.tolist()
    assert [call.parent_id for call in own] == [row.intent.id] * 2
    detail = await home.reader.session(fork["session_id"])
    assert detail.origin is not None
    assert (detail.origin.call_id, detail.origin.at, detail.summary.tags["harness"]) == (row.intent.id, 1, "mine")
    assert (len(detail.calls), detail.report["trained_calls"], detail.report["masked_calls"]) == (1, 1, {"origin": 1})
    call = await home.reader.call(detail.calls[0].id)
    assert call.messages[0].role == "user"
    shown = await page(home, f"/view/sessions/{fork['session_id']}")
    assert f"session {first['session_id']}" in shown
    assert row.intent.id in shown
    command = ["sessions", "fork", first["session_id"], row.intent.id[-8:], "--json", "--url", home.urls["admin"]]
    environment = {"ROLLTAP_ADMIN_KEY": home.app.settings.keys.admin}
    done = await asyncio.to_thread(CliRunner().invoke, app, command, env=environment)
    assert done.exit_code == 0, done.output
    opened = await home.app.services.call_log.session(json.loads(done.stdout)["session_id"])
    assert opened is not None
    assert (origin := opened.origin) is not None
    assert (origin.call_id, origin.at) == (row.intent.id, None)
    for body, status in (
        ({"call": "nothing"}, 404),
        ({"call": row.intent.id, "at": 99}, 400),
        ({"call": row.intent.id, "at": -1}, 400),
        ({}, 400),
    ):
        await post(home, path, body, status)
    await post(home, "/sessions/nobody/fork", {"call": row.intent.id}, 404)


async def test_forked_rollouts_are_leased_with_their_parent_and_train_each_token_once(home: House) -> None:
    group = await home.client.open_group(Task("t", "say hello"), policy=POLICY, n=2)
    first = await post(home, f"/rollouts/{group.rollout_ids[0]}/start", {})
    await ask(first, HI)
    (row,) = await home.app.services.call_log.rows(first["session_id"])
    path = f"/rollouts/{group.rollout_ids[0]}/fork"
    body = {"call": row.intent.id, "at": 1, "n": 2, "id": "mine"}
    forked = await post(home, path, body)
    assert await post(home, path, body) == forked
    ids = [rollout["id"] for rollout in forked["rollouts"]]
    keys = [first, *[await post(home, f"/rollouts/{each}/start", {}) for each in ids[1:]]]
    assert [key["parent"] for key in keys[2:]] == [
        {"rollout_id": ids[0], "call_id": row.intent.id, "at": 1, "fork": "mine"}
    ] * 2
    for key in keys[1:]:
        await ask(key, HI)
    for number, (each, key) in enumerate(zip(ids, keys, strict=True)):
        await home.client.reward(NewReward(each, float(number)))
        await post(home, f"/rollouts/{each}/finish", {"status": "succeeded", "attempt": key["attempt"]})
    (leased,) = (await home.app.services.ledger.trainers.lease(LeaseRequest("trainer", POLICY, 1))).groups
    for record, key in zip(leased.rollouts, keys, strict=True):
        rows = await home.app.services.call_log.rows(key["session_id"])
        sampled = sum(len(each.completion.output_ids) for each in rows if each.completion is not None)
        (segment,) = record.trajectory.segments
        assert segment.loss_mask.sum() == sampled
        spans = [turn for turn in segment.turns if turn.sampled_by]
        assert [turn.sampled_by for turn in spans] == ([ids[0]] if record.rollout.parent else [])
    assert "Forks" in await page(home, f"/view/groups/{group.id}")
    await post(home, path, {"call": row.intent.id}, 409)


async def test_a_task_s_fork_is_checked_when_it_is_submitted(home: House) -> None:
    group = await home.client.open_group(Task("t", "say hello"), policy=POLICY, n=1)
    (rollout,) = group.rollout_ids
    first = await post(home, f"/rollouts/{rollout}/start", {})
    await ask(first, HI)
    (row,) = await home.app.services.call_log.rows(first["session_id"])
    later = Task("later", "go on", {"fork": {"rollout": rollout, "call": row.intent.id}})
    other = await home.client.open_group(later, policy=POLICY, n=2)
    started = await post(home, f"/rollouts/{other.rollout_ids[1]}/start", {})
    assert started["parent"] == {"rollout_id": rollout, "call_id": row.intent.id, "at": None, "fork": ""}
    reply = await ask(started, [*HI, {"role": "assistant", "content": "Hello there."}, *HI])
    assert reply["content"]
    (own,) = await home.app.services.call_log.rows(started["session_id"])
    assert (own.intent.parent_id, own.intent.break_) == (row.intent.id, None)
    for fork in ({"rollout": "r", "call": row.intent.id}, {"rollout": rollout, "call": "c"}, {"rollout": rollout}):
        with pytest.raises(RolltapError):
            await home.client.open_group(Task("bad", "go on", {"fork": fork}), policy=POLICY, n=1)
