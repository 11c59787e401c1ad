"""The context's length goes from the answer that opens a session to every launch that has a setting for it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rolltap.harnesses.agents.registry import get_harness, harness_names
from rolltap.harnesses.base import Command, Endpoint
from rolltap.harnesses.client import AdminClient, ClaimedRollout
from rolltap.harnesses.runner.specs import SAMPLE_JOB, launch_type

from .stub import Stub, running

UNTOLD = (
    "cline", "openhands", "aider", "gptme", "mini-swe-agent", "mini-swe-agent-inprocess", "openai-agents", "smolagents"
)  # fmt: skip
"""Those that have no setting for it: docs/harnesses.md says what happens."""

TOLD = [name for name in harness_names() if name not in UNTOLD]


def text(name: str, context: int) -> str:
    endpoint = replace(SAMPLE_JOB.endpoint, context=context)
    launch = get_harness(name, argv=("x",)).launch(replace(SAMPLE_JOB, endpoint=endpoint))
    assert isinstance(launch, Command)
    return json.dumps([launch.argv, dict(launch.env), dict(launch.files)])


@pytest.mark.parametrize("name", [*TOLD, "command"])
def test_a_launch_holds_the_context(name: str) -> None:
    assert len({text(name, context) for context in (0, 70_000, 90_000)}) == 3


@pytest.mark.parametrize("name", UNTOLD)
def test_a_harness_without_a_setting_is_listed(name: str) -> None:
    page = (Path(__file__).parents[3] / "docs" / "harnesses.md").read_text()
    assert name.removesuffix("-inprocess") in page.split("## The context's length")[1].split("\n## ")[0]
    if launch_type(get_harness(name)) is Command:
        assert text(name, 0) == text(name, 90_000)


async def test_sessions_and_attempts_answer_with_the_context() -> None:
    async with running(Stub(lambda messages: {}, context=45_000)) as stub, AdminClient(stub.url, "k") as client:
        session = await client.open_session()
        attempt = await client.start_rollout(ClaimedRollout("r"), ttl=60)
    assert session.endpoint.context == attempt.endpoint.context == 45_000


@pytest.mark.parametrize(("context", "reserve"), [(0, 0), (20_000, 5_000), (45_000, 11_250), (1_000_000, 16_384)])
def test_a_quarter_is_kept_free_for_a_reply(context: int, reserve: int) -> None:
    assert Endpoint("http://127.0.0.1:1/s/x", "k", "m", context).reserve == reserve
