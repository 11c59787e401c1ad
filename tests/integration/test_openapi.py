"""Requests made from the planes' own OpenAPI schema, sound and unsound: never an internal error.

The cases are the same in every run. The agent plane has no schema: its dialects are the vendors'.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy
from schemathesis import GenerationMode
from schemathesis.core.result import Ok

from rolltap.engine.scripted import say
from rolltap.types import Task

from ..harnesses.house import POLICY, House, house

AT_ONCE = settings(
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
ENDLESS = "/events"
"""What the paths of endless streams end with."""


@pytest.mark.timeout(600)  # a minute on a quiet machine
@pytest.mark.parametrize("count", [3, pytest.param(24, marks=pytest.mark.long)])
@pytest.mark.parametrize("plane", ["admin", "trainer"])
async def test_no_request_is_an_internal_error(plane: str, count: int, tmp_path: Path) -> None:
    """4 or 25 CPU seconds: schemathesis makes `count` requests for every operation and mode."""
    async with house(say("Hello."), tmp_path) as home, aiohttp.ClientSession() as http:
        known = await populated(home)
        url = home.urls[plane]
        key = getattr(home.app.settings.keys, plane)
        statuses: set[int] = set()
        for number, case in enumerate(cases(home.app.planes[plane].app.openapi(), count)):
            sent = request(case, known if number % 2 else {}, url)
            headers = {**sent.headers, "Authorization": f"Bearer {key}"}
            async with http.request(sent.method or "", sent.url or "", data=sent.body, headers=headers) as response:
                told = (await response.read()).decode("utf-8", "replace")
                assert response.status < 500, (case.method, sent.url, sent.body, response.status, told)
                statuses.add(response.status)
        assert {200, 400, 404} <= statuses
        async with http.get(f"{url}/health") as response:
            assert response.status == 200


def cases(schema: dict[str, Any], count: int) -> Iterator[schemathesis.Case]:
    """Requests for every operation, `count` as the schema has them and as many that break it."""
    operations = [
        found.ok() for found in schemathesis.openapi.from_dict(schema).get_all_operations() if isinstance(found, Ok)
    ]
    assert len(operations) == sum(map(len, schema["paths"].values()))
    for operation in operations:
        if operation.path.endswith(ENDLESS):
            continue
        unsound = [GenerationMode.NEGATIVE] if operation.body or operation.query else []  # an id can't be wrong
        for mode in [GenerationMode.POSITIVE, *unsound]:
            yield from examples(operation.as_strategy(generation_mode=mode), count)


def examples(strategy: SearchStrategy[schemathesis.Case], count: int) -> list[schemathesis.Case]:
    made: list[schemathesis.Case] = []

    @settings(AT_ONCE, max_examples=count)
    @given(strategy)
    def make(case: schemathesis.Case) -> None:
        made.append(case)

    make()
    return made


def request(case: schemathesis.Case, known: dict[str, str], url: str) -> requests.PreparedRequest:
    """The case as bytes; with the ids of what exists where it names some, and without a long wait."""
    case.path_parameters = {name: known.get(name, value) for name, value in case.path_parameters.items()}
    if isinstance(case.body, dict):
        case.body = {name: known.get(name, value) for name, value in case.body.items() if name != "wait"}
    return requests.Request(**case.as_transport_kwargs(base_url=url)).prepare()


async def populated(home: House) -> dict[str, str]:
    """One of each thing, by the name that the schema gives its id."""
    group = await home.client.open_group(Task("t", "Look."), policy=POLICY, n=1)
    session = await home.open()
    return {
        "session_id": session.session_id,
        "group_id": group.id,
        "rollout_id": group.rollout_ids[0],
        "name": POLICY,
        "policy": POLICY,
    }
