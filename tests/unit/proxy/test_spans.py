"""Spans of calls: what they say, whose children they are, and that no collector holds a call up."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from rolltap.engine.scripted import say
from rolltap.errors import ConfigError, EngineError
from rolltap.proxy.metrics.spans import CallTracer, otlp

from ...harnesses.house import POLICY, house

USER = {"role": "user", "content": "hi"}
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def spans(plane: Any) -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    plane.recorder._spans = CallTracer(exporter)
    return exporter


async def ended(plane: Any, exporter: InMemorySpanExporter) -> tuple[ReadableSpan, ...]:
    await asyncio.to_thread(plane.recorder._spans.close)
    return exporter.get_finished_spans()


async def test_a_call_is_a_span_by_the_conventions(plane: Any, spans: InMemorySpanExporter) -> None:
    plane.engine.replies = ["one<|im_end|>"]
    await plane.client.chat(USER)
    (span,) = await ended(plane, spans)
    (row,) = await plane.rows()
    attributes = dict(span.attributes or {})
    assert span.name == f"chat {attributes['gen_ai.request.model']}"
    assert attributes["gen_ai.operation.name"] == "chat"
    assert attributes["gen_ai.response.id"] == row.intent.id
    assert attributes["gen_ai.usage.input_tokens"] == len(row.prompt_ids)
    assert attributes["gen_ai.usage.output_tokens"] == len(row.completion.output_ids)
    assert attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert span.parent is None
    assert span.status.is_unset
    assert span.start_time is not None
    assert span.end_time is not None
    assert 0 < span.end_time - span.start_time < 60e9


async def test_a_trace_that_came_in_is_kept(plane: Any, spans: InMemorySpanExporter) -> None:
    plane.engine.replies = ["one<|im_end|>"]
    header = f"00-{TRACE}-{SPAN}-01"
    await plane.client.chat(USER, headers={"traceparent": header})
    (span,) = await ended(plane, spans)
    assert span.context is not None
    assert span.parent is not None
    assert f"{span.context.trace_id:032x}" == TRACE
    assert f"{span.parent.span_id:016x}" == SPAN
    (row,) = await plane.rows()
    assert row.intent.hints["traceparent"] == header  # on record, too


@pytest.mark.parametrize("junk", ["00-zz-1-01", "x" * 5000, "00-" + "0" * 32 + "-" + "0" * 16 + "-01"])
async def test_a_trace_that_makes_no_sense_starts_a_new_one(plane: Any, spans: InMemorySpanExporter, junk: str) -> None:
    plane.engine.replies = ["one<|im_end|>"]
    await plane.client.chat(USER, headers={"traceparent": junk})
    (span,) = await ended(plane, spans)
    assert span.parent is None


async def test_a_call_that_fails_says_so(plane: Any, spans: InMemorySpanExporter) -> None:
    plane.engine.failure = EngineError("broke off")
    await plane.client.chat(USER)
    (span,) = await ended(plane, spans)
    assert not span.status.is_ok
    assert "broke off" in (span.status.description or "")
    assert (span.attributes or {})["error.type"] == "engine_error"


def test_without_opentelemetry_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"\[otel\]"):
        otlp("http://127.0.0.1:4318")


async def test_a_real_proxy_sends_its_spans_to_a_collector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[ExportTraceServiceRequest] = []

    async def take(request: web.Request) -> web.Response:
        assert request.path == "/v1/traces"
        received.append(ExportTraceServiceRequest.FromString(await request.read()))
        return web.Response()

    collector = web.AppRunner(app := web.Application())
    app.router.add_post("/{path:.*}", take)
    await collector.setup()
    site = web.TCPSite(collector, "127.0.0.1", 0)
    await site.start()
    port = collector.addresses[0][1]
    monkeypatch.setenv("ROLLTAP_TRACING__OTLP", f"http://127.0.0.1:{port}")
    async with house(say("Hello."), tmp_path) as home:
        await one_call(home)
    await collector.cleanup()
    batches = [batch for request in received for batch in request.resource_spans]
    assert [span.name for batch in batches for scope in batch.scope_spans for span in scope.spans] == ["chat scripted"]


async def one_call(home: Any) -> None:
    key = (await home.client.open_session()).endpoint.key
    body = {"model": POLICY, "messages": [USER]}
    async with aiohttp.ClientSession() as http:
        url = f"{home.urls['agent']}/v1/chat/completions"
        async with http.post(url, json=body, headers={"authorization": f"Bearer {key}"}) as reply:
            assert reply.status == 200, await reply.text()
