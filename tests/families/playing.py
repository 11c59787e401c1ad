"""A recorded harness plays a session through the proxy."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import aiohttp

from rolltap.harnesses.base import Endpoint

from .recorded import NOTICE, SYSTEM, RecordedHarness, RecordedRequest
from .script import SECOND_TASK, SUMMARY, TASK, output_of

MOST_CALLS = 12
"""A loop that needs more calls for one prompt goes round in circles."""


@dataclass
class Played:
    """How far a session came: `ran` lists the commands that the model called, `answer` is the last reply's text.

    `texts` are what the last request holds of the harness's and the user's own words, in any order. `refusal` is the
    status and message of the request that was refused; empty: none was.
    """

    answer: str = ""
    ran: tuple[str, ...] = ()
    texts: tuple[str, ...] = (SYSTEM,)
    refusal: str = ""


class Refused(Exception):
    """A request was answered with an error: its status and message."""


async def play(harness: RecordedHarness, endpoint: Endpoint, *, compacts: bool = False) -> Played:
    """Two prompts, with a notice in mid-session where the harness sends such. `compacts`: a summary between them."""
    played = Played()
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {endpoint.key}"}) as http:
        try:
            await _prompt(http, harness, endpoint, TASK, played)
            if harness.finish:
                return played
            if compacts:
                await _compact(http, harness, endpoint, played)
            elif harness.notifies:
                _notify(harness, played)
            await _prompt(http, harness, endpoint, SECOND_TASK, played)
        except Refused as error:
            played.refusal = str(error)
    return played


async def _prompt(
    http: aiohttp.ClientSession, harness: RecordedHarness, endpoint: Endpoint, prompt: str, played: Played
) -> None:
    """The user's prompt, and what the harness does until the model calls no more tools."""
    harness.ask(prompt)
    played.texts += (prompt,)
    for _ in range(MOST_CALLS):
        reply = harness.take(await post(http, endpoint, harness.request()))
        calls, played.answer = reply.calls, reply.text
        played.ran += tuple(call.command for call in calls)
        if not calls or harness.finish in (call.command for call in calls):
            return
        outputs = [output_of(call.command) for call in calls]
        harness.answer(calls, outputs)
        if harness.notifies and any(failed for _, failed in outputs):
            _notify(harness, played)
    raise Refused(f"the model still calls tools after {MOST_CALLS} replies")


def _notify(harness: RecordedHarness, played: Played) -> None:
    notice = f"{NOTICE} ({len(played.texts)})"
    harness.notify(notice)
    played.texts += (notice,)


async def _compact(http: aiohttp.ClientSession, harness: RecordedHarness, endpoint: Endpoint, played: Played) -> None:
    await post(http, endpoint, harness.ask_summary())
    harness.compact(SUMMARY)
    played.texts = (SYSTEM,)


async def post(http: aiohttp.ClientSession, endpoint: Endpoint, request: RecordedRequest) -> list[dict[str, Any]]:
    """The events of the reply; raises `Refused` if it is an error."""
    async with http.post(endpoint.base_url + request.path, json=request.body) as response:
        body = await response.text()
    if response.status != 200:
        raise Refused(f"{response.status} {_message(body)}")
    if response.content_type == "application/json":
        return [json.loads(body)]
    return [json.loads(line[6:]) for line in body.split("\n") if line.startswith("data: {")]


def _message(body: str) -> str:
    """What an error says, in any protocol's form."""
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        return body[:500]
    return error["message"] if isinstance(error, dict) else str(error)
