"""The read routes answer what their OpenAPI schema says, with the record's own values."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from rolltap.contract.admin import FinishRollout, NewReward
from rolltap.engine.scripted import say
from rolltap.harnesses.client import ClaimedRollout
from rolltap.types import RolloutStatus, Task

from ..harnesses.house import POLICY, House, house
from .checked_plane import CheckedPlane


@pytest.fixture
async def home(tmp_path: Path) -> AsyncIterator[House]:
    async with house(say("Zebras are striped."), tmp_path, metrics=str(tmp_path / "metrics.jsonl")) as home:
        yield home


async def ask(home: House, http: aiohttp.ClientSession, key: str, text: str) -> None:
    body = {"model": POLICY, "messages": [{"role": "user", "content": text}]}
    headers = {"Authorization": f"Bearer {key}"}
    async with http.post(f"{home.urls['agent']}/v1/chat/completions", json=body, headers=headers) as response:
        assert response.status == 200, await response.text()


async def played_group(home: House, http: aiohttp.ClientSession) -> tuple[str, list[str]]:
    """A complete group of two rollouts, and their sessions."""
    task = Task("t", "Look.")
    group = await home.client.open_group(task, policy=POLICY, n=2)
    sessions = []
    for value, rollout_id in enumerate(group.rollout_ids):
        opened = await home.client.start_rollout(ClaimedRollout(rollout_id), ttl=60)
        await ask(home, http, opened.endpoint.key, "What of zebras?")
        await home.client.reward(NewReward(rollout_id, float(value)))
        end = FinishRollout(RolloutStatus.SUCCEEDED, opened.attempt, evaluation="looked well")
        await home.client.finish_rollout(rollout_id, end)
        sessions.append(opened.session_id)
    return group.id, sessions


async def test_every_read_route_answers_as_its_schema_says(home: House, tmp_path: Path):
    async with aiohttp.ClientSession() as http:
        admin = CheckedPlane(home, http)
        group_id, session_ids = await played_group(home, http)
        page = await admin.get("/read/sessions", sort="reward", where="reward>=0")
        assert [session["id"] for session in page["sessions"]] == session_ids[::-1]
        assert [session["reward"] for session in page["sessions"]] == [1.0, 0.0]
        shown = await admin.get("/read/sessions/{session_id}", session_id=session_ids[0])
        (call,) = shown["calls"]
        (turn,) = await admin.get("/read/sessions/{session_id}/transcript", session_id=session_ids[0])
        assert turn["reply"]["parts"][0]["text"] == "Zebras are striped."
        detail = await admin.get("/read/calls/{call_id}", call_id=call["id"])
        assert detail["messages"][0]["parts"][0]["text"] == "What of zebras?"
        tokens = await admin.get("/read/calls/{call_id}/tokens", call_id=call["id"], start=2, end=4)
        assert [token["index"] for token in tokens["tokens"]] == [2, 3]
        assert await admin.get("/read/calls/{call_id}/break", call_id=call["id"]) is None
        (line,) = await admin.get("/read/groups")
        assert (line["id"], line["rewards"]) == (group_id, [0.0, 1.0])
        group = await admin.get("/read/groups/{group_id}", group_id=group_id)
        assert [rollout["reward"] for rollout in group["rollouts"]] == [1.0, 0.0]
        assert group["rollouts"][0]["evaluation"] == "looked well"
        assert group["common_tokens"] == call["prompt_tokens"] + call["output_tokens"]
        rollout_id = group["rollouts"][1]["rollout"]["id"]
        assert (await admin.get("/read/rollouts/{rollout_id}", rollout_id=rollout_id))["attempts"] == 1
        (run,) = await admin.get("/read/runs")
        assert (run["policy"], run["rollouts"], run["reward"]) == (POLICY, 2, 0.5)
        (point,) = await admin.get("/read/runs/{policy}", policy=POLICY)
        assert (point["group_id"], point["reward_mean"]) == (group_id, 0.5)
        (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5, "kl": NaN}\n{"step": 2, "loss": 0.25}\n{"st')
        steps = await admin.get("/read/runs/{policy}/steps", policy=POLICY)
        assert steps == [{"step": 1, "values": {"loss": 0.5}}, {"step": 2, "values": {"loss": 0.25}}]
        assert await admin.get("/read/runs/{policy}/steps", policy=POLICY, limit=1) == steps[1:]
        assert await admin.get("/read/runs/{policy}/steps", policy="nobody") == []


async def test_a_captured_call_is_scored_labelled_and_found(home: House):
    async with aiohttp.ClientSession() as http:
        admin = CheckedPlane(home, http)
        session = await home.client.open_session(policy=POLICY)
        await ask(home, http, session.endpoint.key, "What of zebras?")
        (call,) = (await admin.get("/read/sessions/{session_id}", session_id=session.session_id))["calls"]
        score = {"kind": "score", "name": "taste", "value": 1, "call_id": call["id"]}
        added = await admin.post("/read/notes", score)
        assert (added["session_id"], added["value"], added["author"]) == (session.session_id, 1, "admin")
        await admin.post("/read/notes", {"kind": "tag", "name": "set", "value": "a", "session_id": session.session_id})
        (found,) = (await admin.get("/read/sessions", where="tag.set=a"))["sessions"]
        assert found["id"] == session.session_id
        assert (await admin.get("/read/calls/{call_id}", call_id=call["id"]))["notes"] == [added]
        refused = await admin.post("/read/notes", {**score, "value": "much"}, status=400)
        assert refused["error"]["param"] == "value"


async def test_what_cannot_be_asked_is_refused_by_name(home: House):
    async with aiohttp.ClientSession() as http:
        admin = CheckedPlane(home, http)
        refused = await admin.get("/read/sessions", status=400, where="colour=red")
        assert "no field 'colour'" in refused["error"]["message"]
        for route in (
            "/read/sessions/{session_id}",
            "/read/calls/{call_id}",
            "/read/calls/{call_id}/tokens",
            "/read/groups/{group_id}",
        ):
            ids = {name: "nobody" for name in ("session_id", "call_id", "group_id") if f"{{{name}}}" in route}
            assert (await admin.get(route, status=404, **ids))["error"]["code"] == "not_found"
        async with http.get(f"{home.urls['admin']}/read/sessions") as response:
            assert response.status == 401
