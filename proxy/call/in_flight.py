"""A request in flight: it is sampled once, and any number of readers can follow its reply.

It runs as its own task, independent of the client's connection. It keeps its events, so a client that retries can join
a request in flight, or receive the reply of a finished one that did not reach it. When the last reader leaves before
the reply is complete, the request is cancelled, and with it the engine's request. `intent` and `completion` make the
rows of its calls.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import msgspec
import numpy as np

from rolltap.calllog.facts import CallCompletion, CallIntent, RequestParts
from rolltap.contract.tags import temperature_of
from rolltap.errors import RolltapError
from rolltap.protocols.conversation import ChatRequest, ReplyEnded, ReplyStarted, ToolChoice, Usage
from rolltap.protocols.thinking import asked_effort
from rolltap.proxy.call.open_call import OpenCall
from rolltap.proxy.call.policy import CallEvent, Policy, Put
from rolltap.proxy.continuation.forest import role_of
from rolltap.proxy.continuation.plan import PromptPlan
from rolltap.proxy.sessions.live_sessions import LiveSession
from rolltap.types import CallKind, CallShape, Finish, Flaw, Outcome, Session

KINDS = frozenset(CallKind)

SESSION_KINDS = {"judge": CallKind.JUDGE, "simulator": CallKind.SIMULATOR}
"""The kind of all calls of a session, by the session's tag `kind`: an evaluator's judge, or a simulated user."""


class WaitingReader:
    """A reader that has all events, and waits for more. `put` takes them in its place, inside `publish`.

    `woken` is done when the reader must go on itself: True when `put` does not take events, and at the end of the
    request; False after `silence_s` seconds without an event. `taken`: how many events `put` took.
    """

    __slots__ = ("_heard_at", "_loop", "_put", "_silence_s", "_timer", "taken", "woken")

    def __init__(self, put: Put, silence_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._put = put
        self._silence_s = silence_s
        self._heard_at = self._loop.time()
        self._timer = self._loop.call_later(silence_s, self._look)
        self.taken = 0
        self.woken: asyncio.Future[bool] = self._loop.create_future()

    def give(self, events: Sequence[CallEvent]) -> None:
        """Passes new events to `put`. What it raises is raised in the reader: the call and other readers go on."""
        if self.woken.done():
            return
        try:
            is_taken = self._put(events)
        except Exception as error:  # noqa: BLE001
            self.woken.set_exception(error)
            return
        if is_taken:
            self.taken += len(events)
            self._heard_at = self._loop.time()
        else:
            self.wake()

    def wake(self) -> None:
        if not self.woken.done():
            self.woken.set_result(True)

    def stop(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        """Ends the wait after silence. The timer is set anew only when it fires, as events come far more often."""
        left = self._heard_at + self._silence_s - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._look)
        elif not self.woken.done():
            self.woken.set_result(False)


@dataclass(slots=True, eq=False)
class InFlightRequest:
    """One request, with one call for each choice that it asks for. `events` grows until the request is `over`."""

    request: ChatRequest
    session: LiveSession
    policy: Policy
    body_hash: str
    calls: list[OpenCall]
    handle: str  # identifies the first call; sent wherever the protocol makes the client echo a value
    events: list[CallEvent] = field(default_factory=list)
    error: RolltapError | None = None
    over: bool = False  # recorded, or failed
    cut: bool = False  # by the stop of this server
    readers: int = 0
    sampling_ended: bool = False  # the completions are being recorded
    given: bool = False  # by the origin of a fork, where its call is on record
    task: asyncio.Task[None] | None = None
    _waiting: list[WaitingReader] = field(default_factory=list)

    @property
    def call_ids(self) -> list[str]:
        """The ids of the calls that this request has put on record."""
        return [] if self.given else [call.id for call in self.calls]

    @property
    def started(self) -> ReplyStarted:
        """The reply's first event."""
        first = self.calls[0]
        return ReplyStarted(first.id, int(first.started_at), self.request.model, len(first.prompt), self.handle)

    @property
    def ended(self) -> ReplyEnded:
        """The reply's terminal event. The first choice's message carries the handle."""
        choices = [call.choice for call in self.calls if call.choice is not None]
        if choices and choices[0].index == 0:
            message = msgspec.structs.replace(choices[0].message, handle=self.handle)
            choices[0] = msgspec.structs.replace(choices[0], message=message)
        return ReplyEnded(tuple(choices), self.usage)

    @property
    def usage(self) -> Usage:
        """Token counts over all choices. Prompt tokens shared with the parent count as cached."""
        reported = [call.usage for call in self.calls if call.usage is not None]
        if reported:
            first = reported[0]
            output = sum(usage.output for usage in reported)
            return Usage(first.prompt, output, first.cached, sum(usage.reasoning for usage in reported))
        first = self.calls[0]
        output = sum(len(call.sampled.ids) for call in self.calls)
        reasoning = sum(call.reasoning_tokens for call in self.calls)
        return Usage(len(first.prompt), output, first.plan.shared, reasoning)

    def intent(self, call: OpenCall, process: str) -> CallIntent:
        """The intent row of a call. It is written before the engine is asked; in chat mode, when the upstream has
        reported its prompt, at the latest with the completion."""
        plan, request, session = call.plan, self.request, self.session.session
        temperature = temperature_of(session, self.policy.name)
        return CallIntent(
            id=call.id,
            session_id=session.id,
            process=process,
            created_at=call.started_at,
            policy=self.policy.name,
            dialect=request.dialect,
            new_ids=plan.prompt_ids[plan.shared :],
            request=RequestParts(
                *(request.head, request.items[plan.items_shared :], plan.items_shared, request.fixed),
                images=call.new_images() if plan.images else (),
            ),
            parent_id=plan.parent.call_id if plan.parent else None,
            shared=plan.shared,
            break_=plan.break_,
            kind=kind_of(session, self.policy.settings.trainable, request),
            agent=request.hints.agent or "",
            body_hash=self.body_hash,
            sampling_asked=msgspec.to_builtins(request.sampling),
            sampling_sent=call.sampling_sent(),
            hints=request.hints.raw,
            shape=shape_of(request, plan, self.policy.source.unapplied(request, temperature), call.under_grammar),
            lineage=msgspec.msgpack.encode(plan.lineage),
            injected=plan.injected,
            images=plan.images,
        )

    def completion(self, call: OpenCall, outcome: Outcome, problem: str) -> CallCompletion:
        """The completion row of a call, durable before the reply's terminal event is sent."""
        sampled, choice = call.sampled, call.choice
        logprobs = np.asarray(sampled.logprobs, np.float32)
        flaw = call.flaw if call.flaw is Flaw.IMAGES_UNKNOWN else sampled.flaw(logprobs) or call.flaw
        counted = call.usage is not None or len(call.prompt) > 0
        finish = Finish.ABORT if outcome is Outcome.ABORTED else Finish.ERROR
        if outcome is Outcome.COMPLETED and choice is not None:
            finish = Finish(choice.finish)
        if call.unknown_finish and not problem:
            problem = f"the engine gives {call.unknown_finish[:80]!r} as its reason for the end, which is taken as stop"
        return CallCompletion(
            call_id=call.id,
            finished_at=time.time(),
            outcome=outcome,
            finish=finish,
            output_ids=np.asarray(sampled.ids, np.int32),
            logprobs=logprobs if len(logprobs) == len(sampled.ids) and not sampled.missing else logprobs[:0],
            versions=sampled.versions or (),
            flaw=flaw,
            message=msgspec.json.encode(choice.message) if choice is not None else b"",
            usage=msgspec.to_builtins(self.usage) if counted else {},
            error=problem,
            engine=self.policy.engine.name,
            logprobs_mode=self.policy.logprobs_mode,
            extras=sampled.aligned(),
            masked=call.masked,
        )

    def publish(self, events: Sequence[CallEvent]) -> None:
        """Adds events and gives them to the readers."""
        if events:
            self.events += events
            for reader in self._waiting:
                reader.give(events)

    def finish(self, error: RolltapError | None) -> None:
        """Marks the request as over and wakes the readers."""
        self.error, self.over = error, True
        for reader in self._waiting:
            reader.wake()

    async def follow(self, silence_s: float, put: Put) -> AsyncIterator[Sequence[CallEvent]]:
        """Yields all events from the first one, in batches. Raises the error that ended the request, if any.

        While the reader waits for more, events go to `put` as they are published, and are yielded only if it does not
        take them. Yields an empty batch after every `silence_s` seconds without an event, so that the reader can send
        its client a keep-alive.
        """
        position = 0
        while True:
            if position < len(self.events):
                gathered = self.events[position:]
                position += len(gathered)
                yield gathered
            elif self.over:
                break
            else:
                reader = WaitingReader(put, silence_s)
                self._waiting.append(reader)
                try:
                    has_more = await reader.woken
                finally:
                    self._waiting.remove(reader)
                    reader.stop()
                position += reader.taken
                if not has_more:
                    yield ()
        if self.error is not None:
            raise self.error


def kind_of(session: Session, trainable: bool, request: ChatRequest) -> CallKind:
    """The call's kind as far as the session's tag, the policy and the harness's hints tell it when the call is made.

    `MAIN` means that nothing is known. The reconstructor decides later from the whole session.
    """
    if (kind := SESSION_KINDS.get(session.tags.get("kind", ""))) is not None:
        return kind
    if not trainable:
        return CallKind.AUXILIARY
    return CallKind(request.hints.kind) if request.hints.kind in KINDS else CallKind.MAIN


DIGEST_BYTES = 8
SYSTEM_ROLES = ("system", "developer")
NOTHING_ASKED = ToolChoice(), None, "", None


def shape_of(chat: ChatRequest, plan: PromptPlan, unapplied: tuple[str, ...], under_grammar: bool) -> CallShape:
    """The features for classification. `replies` is counted only if the call does not continue another without a break.

    `unapplied`: request fields that the source accepts and ignores.
    """
    must_call = chat.tool_choice.mode in ("required", "named") and "tool_choice" not in unapplied
    # What follows a call's beginning is sampled freely, unless a grammar goes on.
    is_free = plan.lineage.call_beginning > 0 and not under_grammar
    is_limited = chat.tool_choice.mode == "auto" and bool(chat.tool_choice.names)
    forced = not is_free and (must_call or is_limited or chat.sampling.json_schema is not None)
    apart = plan.parent is None or plan.break_ is not None
    return CallShape(
        tools=len(chat.tools),
        toolset=plan.lineage.tools[:DIGEST_BYTES].hex() if chat.tools else "",
        system=plan.lineage.system[:DIGEST_BYTES].hex(),
        replies=sum(message.role == "assistant" for message in chat.messages) if apart else 0,
        choices=chat.sampling.n,
        constrained=forced,
        manner=manner_of(chat),
        unapplied=unapplied,
        asked=_asked(chat),
        role=role_of(chat),
        quotes=plan.quotes,
        fitted=plan.fitted,
        follows=plan.follows if apart else "",
        ends=next((message.role for message in reversed(chat.messages) if message.role not in SYSTEM_ROLES), ""),
    )


def manner_of(chat: ChatRequest) -> str:
    return f"{chat.model}, {'streamed' if chat.stream else 'whole'}"


def _asked(chat: ChatRequest) -> str:
    """A digest of the request's demands that its prompt does not show. Requests with different ones are no retries.

    Seeds, temperatures and token limits don't count, as clients change them between tries.
    """
    demands = chat.tool_choice, chat.sampling.thinking, asked_effort(chat.sampling), chat.sampling.json_schema
    if demands == NOTHING_ASKED:
        return ""
    return blake2b(msgspec.json.encode(demands, order="sorted"), digest_size=DIGEST_BYTES).hexdigest()
