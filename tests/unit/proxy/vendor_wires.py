"""What an emulated vendor says in each protocol, and what a harness asks it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

KEY = "sk-the-users-own-vendor-key-0123456789"
BASH = {"type": "object", "properties": {"command": {"type": "string"}}}


def sse(*events: Any) -> list[bytes]:
    """The events of a stream; a mapping with a type is an event of that name."""
    encoded: list[bytes] = []
    for event in events:
        name = b"event: " + event["type"].encode() + b"\n" if isinstance(event, dict) and "type" in event else b""
        encoded.append(name + b"data: " + (event if isinstance(event, bytes) else json.dumps(event).encode()) + b"\n\n")
    return encoded


@dataclass(frozen=True)
class Wire:
    """A protocol as its vendor speaks it. Every reply says "I look." and calls `bash`; usage is 11 in, 7 out.

    `closing` is the first event that a client may take for the reply's end, `echo` the assistant's turn as a harness
    sends it back.
    """

    path: str
    stream_path: str
    headers: Mapping[str, str]
    ask: Mapping[str, Any]
    stream: Mapping[str, Any]
    whole: Mapping[str, Any]
    events: list[bytes]
    closing: int
    history: str
    echo: list[Any]
    query: str = ""


ARGUMENTS = '{"command": "ls"}'
CALL = {"id": "call_v1", "type": "function", "function": {"name": "bash", "arguments": ARGUMENTS}}
CHAT_USAGE = {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18}


def chat_delta(delta: Any, finish: str | None = None) -> Any:
    return {
        "id": "c1",
        "object": "chat.completion.chunk",
        "choices": [{"index": 0, "delta": delta, "finish_reason": finish}],
    }


CHAT_TURN = {"role": "assistant", "content": "I look.", "refusal": None, "annotations": [], "tool_calls": [CALL]}
CHAT = Wire(
    path="/v1/chat/completions",
    stream_path="/v1/chat/completions",
    headers={"authorization": f"Bearer {KEY}"},
    ask={
        "model": "gpt-x",
        "messages": [{"role": "user", "content": "count the files"}],
        "tools": [{"type": "function", "function": {"name": "bash", "parameters": BASH}}],
    },
    stream={"stream": True, "stream_options": {"include_usage": True}},
    whole={
        "id": "c1",
        "object": "chat.completion",
        "choices": [{"index": 0, "message": CHAT_TURN, "finish_reason": "tool_calls"}],
        "usage": CHAT_USAGE,
    },
    events=sse(
        chat_delta({"role": "assistant", "content": "", "refusal": None}),
        chat_delta({"content": "I "}),
        chat_delta({"content": "look."}),
        chat_delta({"tool_calls": [{"index": 0, **CALL, "function": {"name": "bash", "arguments": ""}}]}),
        chat_delta({"tool_calls": [{"index": 0, "function": {"arguments": ARGUMENTS}}]}),
        chat_delta({}, "tool_calls"),
        {"id": "c1", "object": "chat.completion.chunk", "choices": [], "usage": CHAT_USAGE},
        b"[DONE]",
    ),
    closing=5,
    history="messages",
    echo=[
        {"role": "assistant", "content": "I look.", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_v1", "content": "3"},
    ],
)

MESSAGE = {
    "type": "message",
    "id": "msg_1",
    "status": "completed",
    "role": "assistant",
    "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}],
}
FUNCTION = {
    "type": "function_call",
    "id": "fc_1",
    "call_id": "call_v1",
    "name": "bash",
    "arguments": ARGUMENTS,
    "status": "completed",
}
RESPONSE = {
    "id": "resp_1",
    "object": "response",
    "status": "completed",
    "error": None,
    "output": [MESSAGE, FUNCTION],
    "usage": {
        "input_tokens": 11,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 0},
    },
}
RESPONSES = Wire(
    path="/v1/responses",
    stream_path="/v1/responses",
    headers={"authorization": f"Bearer {KEY}"},
    ask={
        "model": "gpt-x-codex",
        "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "count the files"}]}],
        "tools": [{"type": "function", "name": "bash", "parameters": BASH, "strict": False}],
    },
    stream={"stream": True},
    whole=RESPONSE,
    events=sse(
        {
            "type": "response.created",
            "sequence_number": 0,
            "response": {**RESPONSE, "status": "in_progress", "output": []},
        },
        {"type": "response.output_item.added", "output_index": 0, "item": {**MESSAGE, "content": []}},
        {"type": "response.output_text.delta", "output_index": 0, "item_id": "msg_1", "delta": "I look."},
        {"type": "response.output_item.done", "output_index": 0, "item": MESSAGE},
        {"type": "response.output_item.done", "output_index": 1, "item": FUNCTION},
        {"type": "response.completed", "sequence_number": 9, "response": RESPONSE},
    ),
    closing=5,
    history="input",
    echo=[MESSAGE, FUNCTION, {"type": "function_call_output", "call_id": "call_v1", "output": "3"}],
)

USE = {"type": "tool_use", "id": "toolu_v1", "name": "bash", "input": {"command": "ls"}}
ANTHROPIC = Wire(
    path="/v1/messages",
    stream_path="/v1/messages",
    headers={"x-api-key": KEY, "anthropic-version": "2023-06-01"},
    query="beta=true",
    ask={
        "model": "claude-x",
        "max_tokens": 99,
        "messages": [{"role": "user", "content": "count the files"}],
        "tools": [{"name": "bash", "input_schema": BASH}],
    },
    stream={"stream": True},
    whole={
        "id": "msg_v1",
        "type": "message",
        "role": "assistant",
        "content": [{"type": "text", "text": "I look."}, USE],
        "stop_reason": "tool_use",
        "usage": {
            "input_tokens": 4,
            "cache_read_input_tokens": 7,
            "cache_creation_input_tokens": 0,
            "output_tokens": 7,
        },
    },
    events=sse(
        {
            "type": "message_start",
            "message": {
                "id": "msg_v1",
                "role": "assistant",
                "content": [],
                "usage": {"input_tokens": 4, "cache_read_input_tokens": 7, "output_tokens": 1},
            },
        },
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "ping"},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "I look."}},
        {"type": "content_block_stop", "index": 0},
        {"type": "content_block_start", "index": 1, "content_block": {**USE, "input": {}}},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": '{"comm'}},
        {
            "type": "content_block_delta",
            "index": 1,
            "delta": {"type": "input_json_delta", "partial_json": 'and":"ls"}'},
        },
        {"type": "content_block_stop", "index": 1},
        {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 7}},
        {"type": "message_stop"},
    ),
    closing=9,
    history="messages",
    echo=[
        {"role": "assistant", "content": [{"type": "text", "text": "I look."}, USE]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_v1", "content": "3"}]},
    ],
)

PARTS = [{"text": "I look."}, {"functionCall": {"name": "bash", "args": {"command": "ls"}}, "thoughtSignature": "c2ln"}]
COUNTS = {"promptTokenCount": 11, "candidatesTokenCount": 5, "thoughtsTokenCount": 2, "totalTokenCount": 18}


def candidate(parts: list[Any], **fields: Any) -> Any:
    return {
        "candidates": [{"content": {"role": "model", "parts": parts}, "index": 0, **fields}],
        "usageMetadata": COUNTS,
    }


GEMINI = Wire(
    path="/v1beta/models/gemini-x:generateContent",
    stream_path="/v1beta/models/gemini-x:streamGenerateContent",
    headers={},
    query=f"alt=sse&key={KEY}",
    ask={
        "contents": [{"role": "user", "parts": [{"text": "count the files"}]}],
        "tools": [{"functionDeclarations": [{"name": "bash", "parametersJsonSchema": BASH}]}],
    },
    stream={},
    whole=candidate(PARTS, finishReason="STOP"),
    events=sse(candidate(PARTS[:1]), candidate(PARTS[1:], finishReason="STOP")),
    closing=1,
    history="contents",
    echo=[
        {"role": "model", "parts": PARTS},
        {"role": "user", "parts": [{"functionResponse": {"name": "bash", "response": {"output": "3"}}}]},
    ],
)

WIRES = {"openai_chat": CHAT, "openai_responses": RESPONSES, "anthropic": ANTHROPIC, "gemini": GEMINI}
