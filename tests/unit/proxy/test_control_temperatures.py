"""The temperature of a control holds only where calls at it could be trained: the policy's engine says whether."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from rolltap.contract.control import RolloutControl
from rolltap.engine.scripted import say

from ...harnesses.house import POLICY, House, house


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[House]:
    async with house(say("Hello."), tmp_path_factory.mktemp("house")) as home:
        yield home


@pytest_asyncio.fixture(loop_scope="module")
async def home(shared: House) -> House:
    """With an engine that is up and says what its log-probs are."""
    policy = shared.app.policies[POLICY]
    policy.up = policy.known = True
    policy.logprobs_mode = "processed"
    return shared


async def ask(home: House, method: str, path: str, **body: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {home.app.settings.keys.admin}"}
    transport = httpx.ASGITransport(home.app.planes["admin"])
    async with httpx.AsyncClient(transport=transport, base_url="http://proxy", headers=headers) as client:
        return await client.request(method, path, json=None if method == "GET" else body)


async def control(home: House, temperature: float) -> httpx.Response:
    return await ask(home, "POST", f"/policies/{POLICY}/control", temperature=temperature)


async def tag_of_an_attempt(home: House) -> str | None:
    """The temperature that is set for a new attempt's session."""
    task = {"id": "t", "instruction": "Look."}
    group = (await ask(home, "POST", "/groups", policy=POLICY, n=1, task=task)).json()
    begun = await ask(home, "POST", f"/rollouts/{group['rollouts'][0]['id']}/start")
    assert begun.status_code == 200, begun.text
    session = (await ask(home, "GET", f"/read/sessions/{begun.json()['session_id']}")).json()
    return session["summary"]["tags"].get("rolltap.temperature")


async def test_one_that_could_not_be_trained_is_refused(home: House) -> None:
    policy = home.app.policies[POLICY]
    assert (await control(home, 0.7)).status_code == 200
    policy.logprobs_mode = "raw"
    refused = await control(home, 0.8)
    assert (refused.status_code, "log-probs (raw) are not at the sampling temperature" in refused.text) == (400, True)
    assert (await control(home, 1.0)).status_code == 200
    assert await home.app.ledger.controls.of(POLICY) == RolloutControl(temperature=1.0)


async def test_an_engine_that_is_down_still_counts_as_what_it_said(home: House) -> None:
    policy = home.app.policies[POLICY]
    policy.up = False
    assert (await control(home, 0.7)).status_code == 200
    policy.known = False  # as after a start beside a cold engine
    refused = await control(home, 0.8)
    assert (refused.status_code, "has not answered yet" in refused.text) == (503, True)
    assert await home.app.ledger.controls.of(POLICY) == RolloutControl(temperature=0.7)


async def test_attempts_leave_it_out_once_they_could_not_be_trained(
    home: House, caplog: pytest.LogCaptureFixture
) -> None:
    """A control outlives the server that checked it, and the engine may come back with other log-probs."""
    policy = home.app.policies[POLICY]
    assert (await control(home, 0.7)).status_code == 200
    assert await tag_of_an_attempt(home) == "0.7"
    assert "without its control's temperature" not in caplog.text
    policy.logprobs_mode = "raw"
    assert await tag_of_an_attempt(home) is None
    assert "begins without its control's temperature" in caplog.text
    assert "log-probs (raw) are not at the sampling temperature" in caplog.text
    policy.known = False
    assert await tag_of_an_attempt(home) is None
    assert "has not answered yet" in caplog.text
    policy.known, policy.logprobs_mode = True, "processed"
    assert await tag_of_an_attempt(home) == "0.7"
