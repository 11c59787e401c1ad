"""A recorded call is sampled again from the policy now: by an admin alone, and nothing of it is on record."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from .conftest import Viewed


@pytest.fixture
def viewed(viewed_by_all: Viewed) -> Viewed:
    return viewed_by_all


async def replay(viewed: Viewed, call_id: str, status: int = 200, **fields: Any) -> dict[str, Any]:
    """By the browser that was let in, with the token of its forms."""
    async with viewed.browser.get(f"{viewed.admin}/view/form") as response:
        token = (await response.json())["token"]
    headers = {"x-rolltap-form": token}
    async with viewed.browser.post(
        f"{viewed.admin}/view/replays", params={"call_id": call_id, **fields}, headers=headers
    ) as response:
        assert response.status == status, await response.text()
        return await response.json()


async def test_a_replay_samples_the_same_prompt_and_leaves_no_trace(viewed: Viewed):
    talk = await viewed.reading.talk()
    await talk.two_turns()
    first, second = (await viewed.reading.reader.session(talk.session_id)).calls
    home = viewed.reading.home
    recorded = await viewed.reading.reader.prompt(second.id)
    asked = home.engine.journal.count
    answer = await replay(viewed, second.id, temperature=0.5, n=2)
    assert len(answer["samples"]) == 2
    assert "zebra" in answer["then"]
    assert all(sample["text"] and sample["tokens"] > 0 for sample in answer["samples"])
    assert all(sample["finish"] == "stop" and sample["version"] == 0 for sample in answer["samples"])
    entries = [entry for entry in home.engine.journal.entries if entry.index >= asked]
    assert [entry.prompt_ids for entry in entries] == [recorded["prompt_ids"]] * 2
    again = (await viewed.reading.reader.session(talk.session_id)).calls
    assert [call.id for call in again] == [first.id, second.id]
    assert (await viewed.reading.reader.summaries([talk.session_id]))[talk.session_id].calls == 2
    assert f'data-call="{second.id}" action="/view/replays"' in await viewed.get(f"/calls/{second.id}")


async def test_a_replay_needs_an_admin_and_bounds(viewed: Viewed):
    talk = await viewed.reading.talk()
    await talk.two_turns()
    call = (await viewed.reading.reader.session(talk.session_id)).calls[0]
    assert "no call" in (await replay(viewed, "nope", 404))["error"]
    async with viewed.browser.post(f"{viewed.admin}/view/replays", params={"call_id": call.id}) as response:
        assert response.status == 401, "another port's page sends the cookie, but not the token"
    keys = viewed.reading.home.app.settings.keys
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {keys.admin}"}) as admin:
        async with admin.post(f"{viewed.admin}/keys", json={"role": "viewer", "name": "theirs"}) as response:
            key = (await response.json())["key"]
        for n in (0, 9):
            async with admin.post(f"{viewed.admin}/view/replays", params={"call_id": call.id, "n": n}) as response:
                assert response.status == 422
        async with admin.post(f"{viewed.admin}/view/replays", params={"call_id": call.id}) as response:
            assert response.status == 200
    async with (
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as viewer,
        viewer.post(f"{viewed.admin}/view/replays", params={"call_id": call.id}) as response,
    ):
        assert response.status == 403
        assert "admin" in (await response.json())["error"]
