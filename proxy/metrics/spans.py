"""OpenTelemetry spans of calls, named by the semantic conventions for generative AI. Needs `rolltap[otel]`.

A call is one span, from its intent to its completion. If the client sends `traceparent`, it is a child of the client's
span. A separate thread sends spans in batches. Spans that a collector does not accept are dropped: the record has every
call.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

from rolltap import __version__
from rolltap.calllog.facts import CallCompletion, CallIntent
from rolltap.errors import ConfigError
from rolltap.extras import install_line
from rolltap.types import Outcome

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

REQUESTED = ("temperature", "top_p", "top_k", "max_tokens", "seed")
"""Sampling parameters that are recorded under the conventions' names."""


class CallTracer:
    """Creates a span for every call that ends. `exporter` sends the spans."""

    def __init__(self, exporter: SpanExporter) -> None:
        modules = ("resources", "trace", "trace.export")
        resources, sdk, export = (import_module(f"opentelemetry.sdk.{name}") for name in modules)
        self._api = import_module("opentelemetry.trace")
        self._context = import_module("opentelemetry.trace.propagation.tracecontext").TraceContextTextMapPropagator()
        self._provider = sdk.TracerProvider(resource=resources.Resource.create({"service.name": "rolltap"}))
        self._provider.add_span_processor(export.BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("rolltap", __version__)
        self._open_intents: dict[str, CallIntent] = {}

    def begin(self, intent: CallIntent) -> None:
        self._open_intents[intent.id] = intent

    def end(self, completion: CallCompletion, outcome: str) -> None:
        """`outcome` is the completion's, or "unrecorded" if the store did not accept it."""
        intent = self._open_intents.pop(completion.call_id, None)
        if intent is None:
            return
        model = str(intent.sampling_sent.get("model") or intent.policy)
        span = self._tracer.start_span(
            f"chat {model}",
            context=self._context.extract(intent.hints),
            kind=self._api.SpanKind.CLIENT,
            attributes={"gen_ai.request.model": model, **dict(attributes(intent, completion, outcome))},
            start_time=int(intent.created_at * 1e9),
        )
        if outcome != Outcome.COMPLETED:
            span.set_status(self._api.StatusCode.ERROR, completion.error)
        span.end(int(completion.finished_at * 1e9))

    def close(self) -> None:
        """Sends the remaining spans. Waits some seconds for the collector."""
        self._provider.shutdown()


def attributes(intent: CallIntent, completion: CallCompletion, outcome: str) -> Iterator[tuple[str, Any]]:
    """Yields the attributes of a call's span, under the conventions' names where these exist."""
    yield "gen_ai.operation.name", "chat"
    yield "gen_ai.provider.name", completion.engine or "rolltap"
    yield "gen_ai.conversation.id", intent.session_id
    yield "gen_ai.response.id", intent.id
    yield "gen_ai.response.finish_reasons", [completion.finish.value]
    if intent.agent:
        yield "gen_ai.agent.id", intent.agent
    for name in REQUESTED:
        if isinstance(value := intent.sampling_sent.get(name), int | float):
            yield f"gen_ai.request.{name}", value
    if completion.usage:
        yield "gen_ai.usage.input_tokens", completion.usage["prompt"]
        yield "gen_ai.usage.output_tokens", completion.usage["output"]
    if outcome != Outcome.COMPLETED:
        yield "error.type", str(outcome)
    yield "rolltap.policy", intent.policy
    yield "rolltap.dialect", intent.dialect
    yield "rolltap.kind", intent.kind.value
    if intent.parent_id is not None:
        yield "rolltap.parent", intent.parent_id
    if intent.break_ is not None:
        yield "rolltap.break", intent.break_.reason.value
    if completion.versions:
        yield "rolltap.version", completion.versions[-1].version


def otlp(url: str) -> CallTracer:
    """Returns spans for the collector at `url` (OTLP over HTTP). Raises `ConfigError` if OpenTelemetry is not
    installed.

    Headers and time limits come from the exporter's own variables, `OTEL_EXPORTER_OTLP_HEADERS` and the like.
    """
    try:
        exporters = import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    except ModuleNotFoundError as error:
        raise ConfigError(f"settings: tracing.otlp needs OpenTelemetry: {install_line('otel')}") from error
    return CallTracer(exporters.OTLPSpanExporter(endpoint=f"{url.rstrip('/')}/v1/traces"))
