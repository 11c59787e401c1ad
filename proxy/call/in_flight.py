"""A request on its way: sampled once, read by whoever waits for its reply.

A turn runs as a task of its own, apart from the connection that asked for it. Its events are kept, so a client that
retries can join a turn in flight or be given one that ended without reaching it. When the last reader leaves before
the end, the turn is cancelled, and the engine's request with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field

import msgspec
import numpy as np

from rolltap.errors import EngineError, EngineProtocolError, RolltapError, StoreError
from rolltap.proxy.call.merge import merge
from rolltap.proxy.call.policies import CapturePolicy, Policy, PolicyRuntime
from rolltap.proxy.call.recorder import OpenCall, Recorder
from rolltap.proxy.call.sources.chat_reply import UpstreamReply
from rolltap.proxy.call.versions import Versions
from rolltap.proxy.continuation.handles import MAX_POSITION, Handles
from rolltap.proxy.continuation.parser import ReplyParser
from rolltap.proxy.conversation.chat import ChatRequest, Choice, ReplyEnded, ReplyEvent, ReplyStarted, Usage
from rolltap.proxy.engines.base import ChatCall, SampleChunk, SampleRequest
from rolltap.proxy.sessions.session_cache import LiveSession
from rolltap.types import CallKind, Flaw, Outcome

log = logging.getLogger("rolltap.turn")


def kind_of(policy: Policy, chat: ChatRequest) -> CallKind:
    """What is known of a call's purpose when it is made: the policy decides, then what the harness states.

    `MAIN` means that nothing is known; the reconstructor decides from the whole session.
    """
    if not policy.settings.trainable:
        return CallKind.AUXILIARY
    return CallKind(chat.hints.kind) if chat.hints.kind in set(CallKind) else CallKind.MAIN


@dataclass(slots=True, eq=False)
class Turn:
    """One request with a call for every choice it asked for. `events` grow until `ended` or `error` is set."""

    chat: ChatRequest
    live: LiveSession
    policy: Policy
    body_hash: str
    calls: list[OpenCall] = field(default_factory=list)
    choices: dict[int, Choice] = field(default_factory=dict)
    flaws: dict[int, Flaw] = field(default_factory=dict)  # by choice
    reasoning_ids: int = 0
    told: dict[int, Usage] = field(default_factory=dict)  # an upstream's own counts, by choice
    events: list[ReplyEvent] = field(default_factory=list)
    ended: ReplyEnded | None = None
    error: RolltapError | None = None
    readers: int = 0
    closing: bool = False  # sampled to the end; what is left is to record it
    task: asyncio.Task[None] | None = None
    _grown: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def over(self) -> bool:
        return self.ended is not None or self.error is not None

    def started(self, handles: Handles) -> ReplyStarted:
        """The reply's first event. Its handle names the call wherever the protocol has an echo for it."""
        first = self.calls[0]
        handle = handles.mint(first.id, MAX_POSITION)
        return ReplyStarted(first.id, int(first.started_at), self.chat.model, len(first.prompt), handle)

    def usage(self) -> Usage:
        """Counts over all choices; what continues a recorded context counts as cached."""
        first = self.calls[0]
        if told := list(self.told.values()):
            output, reasoning = sum(usage.output for usage in told), sum(usage.reasoning for usage in told)
            return Usage(told[0].prompt, output, told[0].cached, reasoning)
        output = sum(len(call.sampled.ids) for call in self.calls)
        return Usage(len(first.prompt), output, cached=first.plan.shared, reasoning=self.reasoning_ids)

    def kind(self) -> CallKind:
        """What the call is for."""
        return kind_of(self.policy, self.chat)

    def leave(self) -> bool:
        """A reader went away; the last one cancels the turn, unless (True) it had only to be recorded."""
        self.readers -= 1
        if self.readers == 0 and not self.closing and self.task is not None:
            self.live.drop(self)
            self.task.cancel()
            return False
        return self.readers == 0

    def grow(self, event: ReplyEvent | None = None) -> None:
        """Adds an event, or tells the readers that the turn is over."""
        if event is not None:
            self.events.append(event)
        self._grown.set()

    async def follow(self, silence: float) -> AsyncIterator[ReplyEvent | None]:
        """The events from the first one on, until the turn is over; raises what ended it.

        None for every `silence` seconds without an event: whoever waits may have to show that it is still there.
        """
        position = 0
        while True:
            self._grown.clear()
            while position < len(self.events):
                yield self.events[position]
                position += 1
            if self.over:
                break
            if not self._grown.is_set() and not await self._grows_within(silence):
                yield None
        if self.error is not None:
            raise self.error

    async def _grows_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._grown.wait()
        except TimeoutError:
            return False
        return True


class Sampler:
    """Takes turns from their intents to their completions."""

    def __init__(self, recorder: Recorder, handles: Handles, versions: Versions) -> None:
        self._recorder = recorder
        self._handles = handles
        self._versions = versions

    async def run(self, turn: Turn) -> None:
        """Samples and records. The turn is over when this returns, and its record durable."""
        try:
            async for event in merge([self._choice(turn, index) for index in range(len(turn.calls))]):
                turn.grow(event)
            turn.closing = True
            ended = self._ended(turn)
            await self._close(turn, Outcome.COMPLETED)
            turn.ended = ended if turn.error is None else None
        except asyncio.CancelledError:
            if turn.closing:  # this process is stopping: the record is the store's by now
                raise
            turn.error = EngineError("the call was cancelled: its client went away")
            await self._close(turn, Outcome.ABORTED, error="the client went away")
            self._recorder.delivered(turn.calls, False)
        except RolltapError as error:
            if turn.error is None:
                turn.error = error
                await self._close(turn, Outcome.ENGINE_ERROR, error=f"{error.code}: {error.message}")
        except Exception as error:
            log.exception("call %s: failed inside rolltap", turn.calls[0].id)
            turn.error = RolltapError("internal error; the server's log has it")
            await self._close(turn, Outcome.ENGINE_ERROR, error=f"internal_error: {error}")
        finally:
            turn.grow()

    async def open(self, turn: Turn) -> None:
        """Writes the intents of all the turn's calls. Where the store refuses one, those written end as aborted."""
        told = await asyncio.gather(*(self.begin(turn, call) for call in turn.calls), return_exceptions=True)
        failures = [one for one in told if one is not None]
        if not failures:
            return
        written = [index for index, call in enumerate(turn.calls) if call.begun]
        error = "another choice's intent could not be written"
        ends = (self._complete(turn, index, Outcome.ABORTED, error) for index in written)
        for failure in await asyncio.gather(*ends, return_exceptions=True):
            if failure is not None:
                log.warning("call %s: its end could not be recorded: %s", turn.calls[0].id, failure)
        raise failures[0]

    async def begin(self, turn: Turn, call: OpenCall) -> None:
        """Writes the call's intent."""
        await self._recorder.begin(call, turn.live.session.id, turn.policy.name, turn.chat, turn.kind(), turn.body_hash)

    def _choice(self, turn: Turn, index: int) -> AsyncIterator[ReplyEvent]:
        """One choice, as reply events."""
        call, policy = turn.calls[index], turn.policy
        if isinstance(call.request, ChatCall):
            assert isinstance(policy, CapturePolicy)
            return self._overhear(turn, index, policy, call.request)
        assert isinstance(policy, PolicyRuntime)
        return self._sample(turn, index, policy, call.request)

    async def _sample(
        self, turn: Turn, index: int, policy: PolicyRuntime, request: SampleRequest
    ) -> AsyncIterator[ReplyEvent]:
        """The engine's tokens."""
        call = turn.calls[index]
        parser = ReplyParser(
            policy.continuation.renderer,
            call.prompt,
            turn.chat.tools,
            turn.chat.sampling.stop,
            lambda position: self._handles.mint(call.id, position),
            index,
        )
        finish, version = "stop", policy.version
        async with aclosing(_chunks(call, policy, request)) as chunks:
            async for chunk in chunks:
                events = parser.feed(chunk.token_ids)
                call.sampled.take(chunk, parser.consumed)
                for event in events:
                    yield event
                finish = chunk.finish or finish
                if parser.stopped is not None:
                    break
        if finish == "abort":
            raise EngineError("the engine aborted the request")
        events, choice = parser.finish(finish)
        sampled = call.sampled
        sampled.end_at(parser.consumed)
        await self._settle_versions(call, policy, version)
        logprobs = policy.token_logprobs(sampled.ids, sampled.logprobs) if turn.chat.sampling.logprobs else None
        turn.choices[index] = msgspec.structs.replace(choice, logprobs=logprobs)
        turn.reasoning_ids += parser.reasoning_ids
        if parser.unparsable:
            turn.flaws[index] = Flaw.TOOL_CALL_UNPARSABLE
        for event in events:
            yield event

    async def _overhear(
        self, turn: Turn, index: int, policy: CapturePolicy, request: ChatCall
    ) -> AsyncIterator[ReplyEvent]:
        """An upstream's text, and the tokens behind it where it tells all of them."""
        call, version = turn.calls[index], policy.version
        reply = UpstreamReply(turn.chat, lambda position: self._handles.mint(call.id, position), index)
        finish, complete = "stop", False
        async with aclosing(policy.engine.chat(request)) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                if chunk.prompt_ids is not None and not call.begun:
                    call.see(policy.lineages, chunk.prompt_ids)
                    await self.begin(turn, call)
                call.sampled.overhear(chunk)
                for event in reply.feed(chunk):
                    yield event
                finish, complete = chunk.finish or finish, chunk.complete
                if chunk.usage is not None:
                    turn.told[index] = chunk.usage
        if finish == "abort":
            raise EngineError("the upstream aborted the request")
        if not complete or not call.prompt:
            call.sampled.forget()
            turn.flaws[index] = Flaw.TOKENS_MISSING
        elif reply.unparsable:
            turn.flaws[index] = Flaw.TOOL_CALL_UNPARSABLE
        await self._settle_versions(call, policy, version)
        events, turn.choices[index] = reply.finish(finish)
        for event in events:
            yield event

    async def _settle_versions(self, call: OpenCall, policy: Policy, began_at: int) -> None:
        """Tokens whose version the engine does not say are of the policy's, if it had the same at the call's begin."""
        if call.sampled.versions is None and await self._versions.now(policy) == began_at:
            call.sampled.of_version(began_at)

    def _ended(self, turn: Turn) -> ReplyEnded:
        """The terminal event; the first choice's message carries the handle that names the call."""
        handle = turn.started(self._handles).handle
        for index, choice in turn.choices.items():
            message = msgspec.structs.replace(choice.message, handle=handle if index == 0 else None)
            turn.choices[index] = msgspec.structs.replace(choice, message=message)
        return ReplyEnded(tuple(turn.choices[index] for index in sorted(turn.choices)), turn.usage())

    async def _close(self, turn: Turn, outcome: Outcome, *, error: str = "") -> None:
        """Writes the completions; returns when they are durable. The forest learns how the calls ended.

        What may not be on record is not continued: prompts are recorded as what they add to those before them.
        """
        recorded = True
        try:
            await asyncio.gather(*(self._complete(turn, index, outcome, error) for index in range(len(turn.calls))))
        except StoreError as failure:
            outcome, turn.error, recorded = Outcome.ABORTED, failure, False
        for index, call in enumerate(turn.calls):
            choice = turn.choices.get(index)
            reply = choice.message if choice is not None else None
            ids = call.sampled.ids if recorded else []
            turn.live.forest.complete(call.node, np.asarray(ids, np.int32), reply, outcome)

    async def _complete(self, turn: Turn, index: int, outcome: Outcome, error: str) -> None:
        call = turn.calls[index]
        if not call.begun:
            await self.begin(turn, call)
        await self._recorder.complete(
            call,
            turn.policy.name,
            outcome,
            turn.choices.get(index),
            flaw=turn.flaws.get(index),
            usage=turn.usage(),
            error=error,
            engine=turn.policy.engine.name,
            logprobs_mode=turn.policy.logprobs_mode,
        )


async def _chunks(call: OpenCall, policy: PolicyRuntime, request: SampleRequest) -> AsyncGenerator[SampleChunk, None]:
    """The engine's chunks, checked."""
    async with aclosing(policy.engine.sample(request)) as chunks:  # type: ignore[type-var]
        async for chunk in chunks:
            said = chunk.prompt_ids
            if said is not None and said is not request.prompt_ids and list(said) != list(request.prompt_ids):
                raise EngineProtocolError("the engine's prompt ids are not those that were sent")
            yield chunk
