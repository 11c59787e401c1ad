"""What a tool returned that a text-only model can't take is a line of text; what a user sends is refused."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import pytest

from rolltap.settings import PolicySettings

PNG = base64.b64encode(b"\x89PNG and its pixels").decode()
PDF = base64.b64encode(b"%PDF-1.7").decode()
IMAGE = "[image, not shown to this model]"
DOCUMENT = "[document (application/pdf), not shown to this model]"

Media = dict[str, Any]


def chat(media: Media, *, from_tool: bool) -> tuple[str, Any]:
    """`media` is a content part."""
    call = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": "{}"}}
    user = {"role": "user", "content": "Read it." if from_tool else [media]}
    result = [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "Here:"}, media]},
    ]
    return "/v1/chat/completions", {"model": "tiny", "messages": [user, *(result if from_tool else [])]}


def chat_beside(media: Media, *, from_tool: bool) -> tuple[str, Any]:
    """Harnesses put a tool's picture into a user message after the result."""
    path, body = chat({"type": "text", "text": "read"} if from_tool else media, from_tool=from_tool)
    if from_tool:
        body["messages"].append({"role": "user", "content": [media]})
    return path, body


def responses(media: Media, *, from_tool: bool) -> tuple[str, Any]:
    items: list[Any] = [{"role": "user", "content": "Read it." if from_tool else [media]}]
    if from_tool:
        items.append({"type": "function_call", "call_id": "c1", "name": "read", "arguments": "{}"})
        output = [{"type": "input_text", "text": "Here:"}, media]
        items.append({"type": "function_call_output", "call_id": "c1", "output": output})
    return "/v1/responses", {"model": "tiny", "input": items}


def messages(media: Media, *, from_tool: bool) -> tuple[str, Any]:
    turns: list[Any] = [{"role": "user", "content": "Read it." if from_tool else [media]}]
    if from_tool:
        use = {"type": "tool_use", "id": "c1", "name": "read", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "Here:"}, media]}
        turns += [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    return "/v1/messages", {"model": "tiny", "max_tokens": 99, "messages": turns}


def gemini(media: Media, *, from_tool: bool) -> tuple[str, Any]:
    """The part stands inside the response."""
    contents: list[Any] = [{"role": "user", "parts": [{"text": "Read it."} if from_tool else media]}]
    if from_tool:
        response = {"name": "read", "response": {"output": "Here:"}, "parts": [media]}
        contents += [
            {"role": "model", "parts": [{"functionCall": {"name": "read", "args": {}}}]},
            {"role": "user", "parts": [{"functionResponse": response}]},
        ]
    return "/v1beta/models/tiny:generateContent", {"contents": contents}


def gemini_beside(media: Media, *, from_tool: bool) -> tuple[str, Any]:
    """As the Gemini CLI reads a file: beside the response."""
    path, body = gemini(media, from_tool=from_tool)
    if from_tool:
        parts = body["contents"][-1]["parts"]
        parts.append(parts[0]["functionResponse"].pop("parts")[0])
    return path, body


def blob(media_type: str, data: str) -> Media:
    return {"inlineData": {"mimeType": media_type, "data": data}}


def block(kind: str, media_type: str, data: str) -> Media:
    return {"type": kind, "source": {"type": "base64", "media_type": media_type, "data": data}}


Case = tuple[Callable[..., tuple[str, Any]], Media, str]
CASES: dict[str, Case] = {
    "chat image": (chat, {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}, IMAGE),
    "chat remote image": (chat, {"type": "image_url", "image_url": {"url": "https://a.example/x.png"}}, IMAGE),
    "chat image beside": (
        chat_beside,
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}},
        IMAGE,
    ),
    "chat file": (
        chat,
        {"type": "file", "file": {"file_data": f"data:application/pdf;base64,{PDF}"}},
        DOCUMENT,
    ),
    "chat named file": (chat, {"type": "file", "file": {"file_id": "f", "filename": "a.pdf"}}, DOCUMENT),
    "chat audio": (
        chat,
        {"type": "input_audio", "input_audio": {"data": PDF, "format": "wav"}},
        "[audio (audio/wav), not shown to this model]",
    ),
    "responses image": (responses, {"type": "input_image", "image_url": f"data:image/png;base64,{PNG}"}, IMAGE),
    "responses file": (responses, {"type": "input_file", "filename": "a.pdf", "file_data": PDF}, DOCUMENT),
    "messages image": (messages, block("image", "image/png", PNG), IMAGE),
    "messages document": (messages, block("document", "application/pdf", PDF), DOCUMENT),
    "messages remote document": (
        messages,
        {"type": "document", "source": {"type": "url", "url": "https://a.example/x.pdf"}},
        DOCUMENT,
    ),
    "gemini image": (gemini, blob("image/png", PNG), IMAGE),
    "gemini document": (gemini, blob("application/pdf", PDF), DOCUMENT),
    "gemini image beside": (gemini_beside, blob("image/png", PNG), IMAGE),
    "gemini document beside": (gemini_beside, blob("application/pdf", PDF), DOCUMENT),
    "gemini stored file": (gemini, {"fileData": {"mimeType": "application/pdf", "fileUri": "gs://x"}}, DOCUMENT),
    "gemini video": (gemini, blob("video/mp4", PDF), "[video (video/mp4), not shown to this model]"),
}
BROKEN: dict[str, Case] = {
    "no image format of ours": (messages, block("image", "image/svg+xml", PNG), IMAGE),
    "an empty image": (messages, block("image", "image/png", ""), IMAGE),
    "no base64": (responses, {"type": "input_image", "image_url": "data:image/png;base64,!"}, IMAGE),
    "no URL": (chat, {"type": "image_url", "image_url": {"url": "file:///a.png"}}, IMAGE),
    "the vendor's file": (responses, {"type": "input_image", "file_id": "f"}, IMAGE),
}


@pytest.mark.parametrize(("write", "media", "line"), [*CASES.values(), *BROKEN.values()], ids=[*CASES, *BROKEN])
async def test_a_tools_media_are_a_line(
    plane: Any, write: Callable[..., tuple[str, Any]], media: Media, line: str
) -> None:
    path, body = write(media, from_tool=True)
    answer = await plane.client.post(path, body)
    assert answer.status == 200, answer.body
    prompt = plane.engine.tokenizer.decode(list(plane.engine.seen[0].prompt_ids))
    assert line in prompt
    assert PNG not in prompt
    assert PDF not in prompt
    (row,) = await plane.rows()
    assert {"tool_media", "tool_document"} & set(row.intent.shape.unapplied)


@pytest.mark.parametrize(("write", "media", "line"), CASES.values(), ids=list(CASES))
async def test_a_users_media_are_refused_in_words(
    plane: Any, write: Callable[..., tuple[str, Any]], media: Media, line: str
) -> None:
    path, body = write(media, from_tool=False)
    answer = await plane.client.post(path, body)
    assert answer.status == 400
    named = line[1:].partition(",")[0].partition(" (")[0]
    assert named in answer.json()["error"]["message"]


@pytest.mark.parametrize("case", ["chat image", "chat file", "gemini image beside"])
async def test_a_policy_may_refuse_them(plane: Any, case: str) -> None:
    write, media, _ = CASES[case]
    plane.policy.source.settings = PolicySettings(engine="told", tool_media="refuse")
    path, body = write(media, from_tool=True)
    answer = await plane.client.post(path, body)
    assert (answer.status, b"tool returned" in answer.body) == (400, True)


async def test_the_next_turn_extends_the_prompt(plane: Any) -> None:
    path, body = CASES["messages image"][0](CASES["messages image"][1], from_tool=True)
    first = (await plane.client.post(path, body)).json()
    body["messages"] += [{"role": "assistant", "content": first["content"]}, {"role": "user", "content": "And?"}]
    assert (await plane.client.post(path, body)).status == 200
    rows = await plane.rows()
    assert (rows[1].intent.parent_id, rows[1].intent.break_) == (rows[0].intent.id, None)
    assert rows[1].intent.shared == len(rows[0].prompt_ids) + len(rows[0].completion.output_ids)


@pytest.mark.parametrize("odd", ["twice", "without its call", "without an id"])
async def test_an_odd_result_is_rendered_and_noted(plane: Any, odd: str) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": "{}"}}
    turn = {"role": "assistant", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "c1", "content": "soil"}
    history: list[Any] = [{"role": "user", "content": "Read it."}, turn, result]
    if odd == "twice":
        history.append({**result, "content": "sand"})
    elif odd == "without its call":
        del history[1]
    else:
        del history[2]["tool_call_id"]
    answer = await plane.client.chat(*history)
    assert answer.status == 200, answer.body
    prompt = plane.engine.tokenizer.decode(list(plane.engine.seen[0].prompt_ids))
    assert "soil" in prompt
    assert ("sand" in prompt) == (odd == "twice")
    (row,) = await plane.rows()
    expected = {"twice": ("tool_result_repeated",), "without its call": ("tool_result_unmatched",)}.get(odd, ())
    assert row.intent.shape.unapplied == expected
