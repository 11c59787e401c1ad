"""Ids belong to who gave them: the client gets handles, the upstream and the model's prompt get their own ids back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from rolltap.proxy.app import Rolltap
from rolltap.proxy.server import bind, serve
from rolltap.settings import Settings

SIGNATURE = {"google": {"thought_signature": "c2lnbmVk"}}
SIGNED = {"type": "reasoning.text", "index": 0, "format": "theirs-v1"}
SEALED = {"type": "reasoning.encrypted", "data": "c2VhbGVk", "id": "rs_1", "index": 1}
THOUGHTS: list[dict[str, Any]] = [
    {"reasoning": "I co", "reasoning_details": [{**SIGNED, "text": "I co"}]},
    {"reasoning": "unt.", "reasoning_details": [{**SIGNED, "text": "unt.", "signature": None}]},
    {"reasoning_details": [{**SIGNED, "text": "", "signature": "c2lnbmVk"}, SEALED]},
]
BASH = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}
USER = {"role": "user", "content": "count the files"}


@dataclass
class Vendor:
    """A chat upstream that gives its calls ids and a thought signature, and keeps what it is asked."""

    bodies: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        self.bodies.append(json.loads(await reader.readexactly(int(head.split("content-length:")[1].split("\r\n")[0]))))
        calls = [
            {"index": at, "id": f"call-{at}-of-theirs", "function": {"name": "bash", "arguments": "{}"}}
            for at in (0, 1)
        ]
        calls[0]["extra_content"] = SIGNATURE
        event = {"choices": [{"index": 0, "delta": {"tool_calls": calls}, "finish_reason": "tool_calls"}]}
        thoughts = [{"choices": [{"index": 0, "delta": delta}]} for delta in THOUGHTS]
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
        for each in (*thoughts, event):
            writer.write(f"data: {json.dumps(each)}\n\n".encode())
        writer.write(b"data: [DONE]\n\n")
        await writer.drain()
        writer.close()


@asynccontextmanager
async def proxy(folder: Path, vendor: Vendor) -> AsyncIterator[tuple[str, str]]:
    settings = Settings.model_validate(
        {
            "data": folder,
            "engines": {"main": {"kind": "openai_compatible", "url": vendor.url}},
            "policies": {"default": {"engine": "main", "model": "theirs"}},
        }
    )
    async with Rolltap.running(settings) as app:
        socket, stop = bind("127.0.0.1", 0), asyncio.Event()
        serving = asyncio.create_task(serve({"agent": (app.planes["agent"], socket)}, stop))
        try:
            yield f"http://127.0.0.1:{socket.getsockname()[1]}/v1/chat/completions", app.settings.keys.project
        finally:
            stop.set()
            await serving


async def ask(url: str, key: str, messages: list[Any]) -> dict[str, Any]:
    body = {"model": "default", "messages": messages, "tools": [BASH]}
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {key}"}) as client:
        reply = await client.post(url, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["message"]


@pytest.mark.parametrize("restarted", [False, True])
async def test_an_upstream_gets_its_own_ids_and_signatures_back(tmp_path: Path, restarted: bool) -> None:
    vendor = Vendor()
    server = await asyncio.start_server(vendor.handle, "127.0.0.1", 0)
    vendor.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        async with proxy(tmp_path, vendor) as (url, key):
            turn = await ask(url, key, [USER])
            handles = [call["id"] for call in turn["tool_calls"]]
            results = [{"role": "tool", "tool_call_id": id, "content": "3"} for id in reversed(handles)]
            if not restarted:
                await ask(url, key, [USER, turn, *results])
        if restarted:
            async with proxy(tmp_path, vendor) as (url, key):
                await ask(url, key, [USER, turn, *results])
    assert all(handle.startswith("call_") for handle in handles)
    assistant, *answers = vendor.bodies[-1]["messages"][-3:]
    assert [call["id"] for call in assistant["tool_calls"]] == ["call-0-of-theirs", "call-1-of-theirs"]
    assert [call.get("extra_content") for call in assistant["tool_calls"]] == [SIGNATURE, None]
    assert assistant["reasoning_details"] == [{**SIGNED, "text": "I count.", "signature": "c2lnbmVk"}, SEALED]
    assert sorted(answer["tool_call_id"] for answer in answers) == ["call-0-of-theirs", "call-1-of-theirs"]
