"""Rollouts for NeMo Gym against a whole server: replies as NeMo RL trains on them. `tests/trainers` has Gym's own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rolltap.calllog.facts import CallRow
from rolltap.engine.scripted import Rule, Script, ScriptedReply, ToolUse
from rolltap.errors import InvalidRequest
from rolltap.harnesses.runner.node import NodeAgent, NodeSettings
from rolltap.harnesses.runner.specs import Defaults
from rolltap.trainer_client.adapters.nemo_gym_agent import FAILURE, TASK, GymAgent

from ..harnesses.house import POLICY, House, house

TALKER = """
import json, os, sys, urllib.request as u
url, key = os.environ["OPENAI_BASE_URL"] + "/chat/completions", os.environ["OPENAI_API_KEY"]
headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
tool = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}
messages = [{"role": "user", "content": sys.argv[1]}]
for _ in range(3):
    if "edits" in sys.argv[1] and len(messages) > 1:
        messages[0] = {"role": "user", "content": "This is a summary."}
    body = {"model": os.environ["OPENAI_MODEL"], "messages": messages, "tools": [tool]}
    reply = json.load(u.urlopen(u.Request(url, json.dumps(body).encode(), headers)))["choices"][0]["message"]
    messages.append(reply)
    for call in reply.get("tool_calls") or ():
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": "a.txt"})
    if not reply.get("tool_calls"):
        messages.append({"role": "user", "content": "Go on."})
"""
"""An agent of three calls. It changes its history if its prompt says so."""

SCRIPT = Script(
    rules=(
        Rule(
            when="Count",
            turns=(
                ScriptedReply(say="I look.", call=(ToolUse("bash", {"command": "ls"}),)),
                ScriptedReply(say="One file."),
                ScriptedReply(say="It is a.txt."),
            ),
        ),
    ),
    otherwise=ScriptedReply(say="Hello."),
)


def row(instruction: str, **spec: Any) -> dict[str, Any]:
    """A row of NeMo Gym whose task the talker plays."""
    task = {"id": "talk", "instruction": instruction, "harness": "command", "runtime": "process"}
    task |= {"argv": ["python3", "-c", TALKER, "{prompt}"], "evaluator": {"kind": "session_completed"}}
    asked = {"input": [{"role": "user", "content": instruction}]}
    return {"responses_create_params": asked, TASK: {**task, **spec}}


@asynccontextmanager
async def node(home: House) -> AsyncIterator[None]:
    """A node runs what is submitted."""
    stop = asyncio.Event()
    defaults = Defaults(workspaces=home.workspaces)
    running = asyncio.create_task(NodeAgent(home.client, NodeSettings("n", wait=0.1), defaults).run(stop))
    try:
        yield
    finally:
        stop.set()
        await running


async def rows_of(home: House, session_id: str) -> Sequence[CallRow]:
    return await home.app.services.call_log.rows(session_id)


def check_tokens(output: Sequence[Mapping[str, Any]], rows: Sequence[CallRow]) -> None:
    """The items with tokens are the recorded calls, and each prompt begins with all tokens before it."""
    seen: list[int] = []
    trained = [item for item in output if "generation_token_ids" in item]
    for item, call in zip(trained, [row.call() for row in rows], strict=True):
        assert item["prompt_token_ids"] == call.prompt_ids.tolist()
        assert item["generation_token_ids"] == call.output_ids.tolist()
        assert item["generation_log_probs"] == call.logprobs.tolist()
        assert item["prompt_token_ids"][: len(seen)] == seen, "NeMo RL asserts this"
        seen = [*item["prompt_token_ids"], *item["generation_token_ids"]]


@pytest.fixture
async def home(tmp_path: Path) -> AsyncIterator[House]:
    async with house(SCRIPT, tmp_path) as running, node(running):
        yield running


async def test_a_reply_has_the_recorded_tokens_of_every_turn(home: House):
    request = row("Count the files.")
    reply = await GymAgent(home.client, POLICY).run(request)
    assert (reply["reward"], reply["responses_create_params"]) == (1.0, request["responses_create_params"])
    output = reply["response"]["output"]
    assert [(item["type"], "generation_token_ids" in item) for item in output] == [
        ("message", False),
        ("function_call", True),
        ("function_call_output", False),
        ("message", True),
        ("message", False),  # the user's
        ("message", True),
    ]
    assert [output[at]["content"][0]["text"] for at in (0, 3, 5)] == ["I look.", "One file.", "It is a.txt."]
    assert (output[2]["output"], output[4]["content"]) == ("a.txt", "Go on.")
    check_tokens(output, await rows_of(home, reply["session_id"]))


async def test_what_is_no_single_run_of_tokens_is_refused_in_words_after_as_many_tries(home: House):
    reply = await GymAgent(home.client, POLICY, tries=2).run(row("Count what he edits."))
    assert (reply[FAILURE], reply["response"]["output"], "reward" in reply) == ("refused", [], False)
    first, second = reply["refused"]
    assert first.endswith("is 2 runs of tokens, not one: history_edited 1"), first
    assert first != second, "each names its own session"
    failed = await GymAgent(home.client, POLICY).run(row("Hello.", argv=["false"]))
    assert "nothing_sampled" in failed["refused"][0]


async def test_a_request_without_a_task_or_at_another_temperature_says_what_to_change(home: House):
    agent = GymAgent(home.client, POLICY)
    with pytest.raises(InvalidRequest, match="the row has no `rolltap_task`"):
        await agent.run({"responses_create_params": {"input": "Hello."}})
    with pytest.raises(InvalidRequest, match="the field `instruction` is missing"):
        await agent.run({"responses_create_params": {"input": "Hello."}, TASK: {"id": "a"}})
    request = row("Count the files.")
    request["responses_create_params"]["temperature"] = 0.5
    reply = await agent.run(request)
    assert "sampled at temperature 1, and the request says 0.5" in reply["refused"][0]


async def test_nobody_plays_on_for_a_request_that_was_given_up(tmp_path: Path):
    async with house(SCRIPT, tmp_path) as home:  # without a node
        waiting = asyncio.create_task(GymAgent(home.client, POLICY).run(row("Count the files.")))
        while not (found := (await home.client.get("/tasks"))["submissions"]):  # noqa: ASYNC110  the event is the server's
            await asyncio.sleep(0.05)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        (submission,) = (await home.client.get("/tasks"))["submissions"]
        assert (submission["id"], submission["cancelled"]) == (found[0]["id"], True)
