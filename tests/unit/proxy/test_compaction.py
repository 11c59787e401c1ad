"""Compaction over Responses: a summary is sampled, one item carries its handle, and the item is taken back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rolltap.protocols.handles import Handles
from rolltap.protocols.openai_responses.read import ResponsesReader
from rolltap.protocols.openai_responses.recall import HEAD, PROMPT
from rolltap.types import CallKind, Outcome

from .conftest import SECRET, make_plane, serve

TRIGGER = {"type": "compaction_trigger"}
SUMMARY = "The user wants a garden. Two beds are dug; the third is next, and then the seeds."
TASK = {"role": "user", "content": "Dig three beds."}
LOOK = {"type": "function", "name": "look", "parameters": {"type": "object"}}


def request(*items: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "input": [TASK, *items], "tools": [LOOK], **fields}


def output(answer: Any) -> list[dict[str, Any]]:
    assert answer.status == 200, answer.body
    return answer.json()["output"]


def prompt_text(plane: Any, at: int = -1) -> str:
    return plane.engine.tokenizer.decode(list(plane.engine.seen[at].prompt_ids))


async def compacted(plane: Any, path: str = "/v1/responses", **fields: Any) -> dict[str, Any]:
    """The compaction item of a session that has made one call."""
    plane.engine.replies = ["Two are dug.<|im_end|>", f"<think>\nhm\n</think>\n\n{SUMMARY}<|im_end|>"]
    first = output(await plane.client.post("/v1/responses", request()))
    trigger = [] if path.endswith("/compact") else [TRIGGER]
    answer = await plane.client.post(path, request(*first, *trigger, **fields))
    (item,) = output(answer)
    return item


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/responses/compact"])
async def test_the_reply_is_one_item_with_a_handle(plane: Any, path: str) -> None:
    item = await compacted(plane, path)
    rows = await plane.rows()
    assert item["type"] == "compaction"
    assert Handles(SECRET).read(item["encrypted_content"]) == rows[1].intent.id
    assert item["id"] == f"cmp_{item['encrypted_content']}"
    assert SUMMARY not in json.dumps(item)
    summary = rows[1].intent
    assert (summary.kind, summary.parent_id, summary.break_) == (CallKind.SUMMARY, rows[0].intent.id, None)
    assert PROMPT in prompt_text(plane)
    assert rows[1].completion.outcome is Outcome.COMPLETED


async def test_the_path_answers_with_the_vendors_object(plane: Any) -> None:
    plane.engine.replies = [SUMMARY + "<|im_end|>"]
    answer = (await plane.client.post("/v1/responses/compact", request())).json()
    assert (answer["object"], [item["type"] for item in answer["output"]]) == ("response.compaction", ["compaction"])
    assert answer["usage"]["output_tokens"] > 0


async def test_the_item_is_taken_back_as_the_summary(plane: Any) -> None:
    item = await compacted(plane)
    plane.engine.replies = ["Going on.<|im_end|>", "Done.<|im_end|>"]
    reply = output(await plane.client.post("/v1/responses", request(item)))
    text = prompt_text(plane)
    assert HEAD + SUMMARY in text
    assert "Two are dug." not in text
    assert output(await plane.client.post("/v1/responses", request(item, *reply, TASK)))
    rows = await plane.rows()
    assert rows[3].intent.parent_id == rows[2].intent.id
    assert rows[3].intent.break_ is None
    assert rows[2].intent.shape.quotes == (rows[1].intent.id,)


@pytest.mark.parametrize(
    "form",
    [
        lambda item: {"type": "compaction", "encrypted_content": item["encrypted_content"]},
        lambda item: {"type": "compaction", "id": item["id"]},
        lambda item: {**item, "type": "compaction_summary", "created_by": "us"},
        lambda item: {"type": "item_reference", "id": item["id"]},
    ],
)
async def test_the_item_is_read_in_every_form(plane: Any, form: Any) -> None:
    item = await compacted(plane)
    output(await plane.client.post("/v1/responses", request(form(item))))
    assert SUMMARY in prompt_text(plane)


async def test_another_process_reads_the_item_from_the_record(plane: Any) -> None:
    item = await compacted(plane)
    other = serve(plane.log, plane.engine, plane.session, plane.limits)
    output(await other.client.post("/v1/responses", request(item)))
    assert SUMMARY in prompt_text(plane)


async def test_a_compaction_of_a_compaction(plane: Any) -> None:
    item = await compacted(plane)
    plane.engine.replies = ["A shorter one, still long enough to be quoted.<|im_end|>"]
    (second,) = output(await plane.client.post("/v1/responses", request(item, TRIGGER)))
    output(await plane.client.post("/v1/responses", request(second)))
    assert "A shorter one" in prompt_text(plane)
    assert SUMMARY not in prompt_text(plane)


@pytest.mark.parametrize("content", ["call_forged", "gAAAAvendor", "", None])
async def test_an_item_of_nobody_is_refused_in_words(plane: Any, content: str | None) -> None:
    answer = await plane.client.post("/v1/responses", request({"type": "compaction", "encrypted_content": content}))
    assert (answer.status, answer.json()["error"]["param"]) == (400, "input")
    assert "another server or session" in answer.json()["error"]["message"]


async def test_an_item_of_another_session_is_refused(plane: Any, tokenizer: Any) -> None:
    other = await make_plane(tokenizer, plane.limits)
    item = await compacted(other)
    assert (await plane.client.post("/v1/responses", request(item))).status == 400


async def test_a_trigger_in_the_middle_is_refused(plane: Any) -> None:
    answer = await plane.client.post("/v1/responses", request(TRIGGER, TASK))
    assert (answer.status, answer.json()["error"]["param"]) == (400, "input[1]")


async def test_the_stream_has_one_item_and_is_completed(plane: Any) -> None:
    plane.engine.replies = [SUMMARY + "<|im_end|>"]
    answer = await plane.client.post("/v1/responses", request(TRIGGER, stream=True))
    events = [json.loads(line[6:]) for line in answer.body.splitlines() if line.startswith(b"data: ")]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"].removeprefix("response.") for event in events] == [
        *("created", "in_progress", "output_item.added", "output_item.done", "completed")
    ]
    assert events[-1]["response"]["output"] == [events[3]["item"]]
    reader = ResponsesReader()
    for event in events:
        reader.event(json.dumps(event).encode())
    assert reader.ended


async def test_a_summary_that_was_cut_off_still_stands_for_the_history(plane: Any) -> None:
    plane.engine.replies = ["<think>\nThe user wants a garden, and I"]
    (item,) = output(await plane.client.post("/v1/responses", request(TRIGGER)))
    output(await plane.client.post("/v1/responses", request(item)))
    assert HEAD + "The user wants a garden, and I" in prompt_text(plane)


async def test_tools_are_not_called_for_a_summary(plane: Any) -> None:
    plane.engine.replies = ['<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call><|im_end|>']
    (item,) = output(await plane.client.post("/v1/responses", request(TRIGGER, tool_choice="auto")))
    assert item["type"] == "compaction"
