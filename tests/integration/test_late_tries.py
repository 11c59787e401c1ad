"""Over HTTP: a start whose client has tried again meanwhile begins no other attempt."""

from __future__ import annotations

from pathlib import Path

import aiohttp

from rolltap.engine.scripted import say
from rolltap.harnesses.client import ClaimedRollout
from rolltap.types import Task

from ..harnesses.house import POLICY, house


async def test_a_start_that_comes_late_leaves_the_attempt_and_its_key(tmp_path: Path) -> None:
    async with house(say("Hello."), tmp_path) as home, aiohttp.ClientSession(headers=home.client.headers) as http:
        group = await home.client.open_group(Task("t", "Look."), policy=POLICY, n=1)
        url = f"{home.client.url}/rollouts/{group.rollout_ids[0]}/start"
        told = {}
        for tried in ("start/1", "start/0", "a header of another client's", "/", "start/-1"):
            async with http.post(url, json={"ttl": 60}, headers={"x-rolltap-try": tried}) as answer:
                told[tried] = answer.status, await answer.json()
        assert [status for status, _ in told.values()] == [200, 409, 200, 200, 200]
        assert "came late" in told["start/0"][1]["error"]["message"]
        assert told["a header of another client's"][1]["attempt"] == 2
        assert (await home.client.start_rollout(ClaimedRollout(group.rollout_ids[0]), ttl=60)).attempt == 5


async def test_a_later_try_that_is_under_way_itself_refuses_no_earlier_one(tmp_path: Path) -> None:
    """It is in the audit log from its beginning on. So far it has changed nothing."""
    async with house(say("Hello."), tmp_path) as home, aiohttp.ClientSession(headers=home.client.headers) as http:
        for tried in ("cancel/1", "cancel/0"):
            url = f"{home.client.url}/groups/none/cancel"
            async with http.post(url, json={}, headers={"x-rolltap-try": tried}) as answer:
                assert answer.status == 404
