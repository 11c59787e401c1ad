"""Writes a call's facts in their order: intent, completion, delivery."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from rolltap.calllog.base import CallCompletion, CallIntent, CallLog, RequestParts
from rolltap.crash import crash_point
from rolltap.errors import RolltapError, StoreError
from rolltap.ids import new_id
from rolltap.proxy.call.metrics import Metrics
from rolltap.proxy.call.shape import shape_of
from rolltap.proxy.continuation.forest import Node
from rolltap.proxy.continuation.plan import Lineages, PromptPlan
from rolltap.proxy.conversation.chat import ChatRequest, Choice, Usage
from rolltap.proxy.engines.base import ChatCall, ChatChunk, SampleChunk, SampleRequest
from rolltap.types import CallKind, Finish, Flaw, Outcome, VersionSpan

log = logging.getLogger("rolltap.recorder")


@dataclass(slots=True, eq=False)
class Sampled:
    """What an engine has sampled so far of one call."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    missing: bool = False
    versions: tuple[VersionSpan, ...] | None = None
    extras: dict[str, list[np.ndarray]] = field(default_factory=dict)

    def take(self, chunk: SampleChunk, end: int) -> None:
        """Takes in a chunk's tokens up to the `end`-th of the whole output: a stop string may end it earlier."""
        size = min(len(chunk.token_ids), end - len(self.ids))
        self.ids += chunk.token_ids[:size]
        if chunk.logprobs is None:
            self.missing = self.missing or size > 0
        else:
            self.logprobs += chunk.logprobs[:size]
        if chunk.versions is not None:
            self.versions = _until(chunk.versions, len(self.ids))
        for name, array in chunk.extras.items():
            self.extras.setdefault(name, []).append(array[:size])
        for name, array in chunk.whole.items():
            self.extras[name] = [array[: len(self.ids)]]

    def end_at(self, size: int) -> None:
        """Leaves the first `size` tokens: a stop string was found only when the reply was whole."""
        if size >= len(self.ids):
            return
        del self.ids[size:], self.logprobs[size:]
        self.versions = self.versions and _until(self.versions, size)
        self.extras = {name: [np.concatenate(arrays)[:size]] for name, arrays in self.extras.items()}

    def aligned(self) -> dict[str, np.ndarray]:
        """The optional arrays, [T, ...] each; one that the engine did not give for every token is left out."""
        whole = {name: np.concatenate(arrays) for name, arrays in self.extras.items()}
        return {name: array for name, array in whole.items() if len(array) == len(self.ids)}

    def overhear(self, chunk: ChatChunk) -> None:
        """Takes in the tokens of an upstream's chunk."""
        self.ids += chunk.token_ids
        if chunk.logprobs is None:
            self.missing = self.missing or bool(chunk.token_ids)
        else:
            self.logprobs += chunk.logprobs

    def forget(self) -> None:
        """Not all tokens came: what is left is text."""
        self.ids, self.logprobs, self.missing = [], [], False

    def of_version(self, version: int) -> None:
        """All tokens were sampled from weights `version`."""
        self.versions = (VersionSpan(version, 0, len(self.ids)),) if self.ids else ()

    def flaw(self) -> Flaw | None:
        """Why these tokens can't be trained, if they can't."""
        if self.missing or len(self.logprobs) != len(self.ids):
            return Flaw.LOGPROBS_MISSING
        if not np.isfinite(np.asarray(self.logprobs, np.float32)).all():
            return Flaw.LOGPROBS_NOT_FINITE
        if self.versions is None and self.ids:
            return Flaw.VERSION_UNKNOWN
        return None


def _until(versions: Sequence[VersionSpan], end: int) -> tuple[VersionSpan, ...]:
    """The spans up to the `end`-th token."""
    cut = [VersionSpan(span.version, span.start, min(span.end, end)) for span in versions]
    return tuple(span for span in cut if span.start < span.end)


@dataclass(slots=True, eq=False)
class OpenCall:
    """A call on its way to its completion. `begun` once its intent is written; `prompt` is what its engine sees."""

    id: str
    node: Node
    plan: PromptPlan
    request: SampleRequest | ChatCall
    prompt: Sequence[int]
    started_at: float
    sampled: Sampled = field(default_factory=Sampled)
    begun: bool = False

    def see(self, lineages: Lineages, prompt: Sequence[int]) -> None:
        """Takes in the prompt that an upstream says it rendered."""
        self.prompt = list(prompt)
        self.plan = lineages.seen(self.plan, np.asarray(self.prompt, np.int32))
        self.node.prompt_ids, self.node.shared = self.plan.prompt_ids, self.plan.shared


class Recorder:
    """The one writer of calls in a proxy process."""

    def __init__(self, call_log: CallLog) -> None:
        self._log = call_log
        self.process = new_id()
        self.metrics = Metrics()
        self._deliveries: set[asyncio.Task[None]] = set()

    async def begin(
        self,
        call: OpenCall,
        session_id: str,
        policy: str,
        chat: ChatRequest,
        kind: CallKind,
        body_hash: str,
    ) -> None:
        """Returns when the intent survives the death of this process."""
        crash_point("intent")
        plan = call.plan
        await self._log.append_intent(
            CallIntent(
                id=call.id,
                session_id=session_id,
                process=self.process,
                created_at=call.started_at,
                policy=policy,
                dialect=chat.dialect,
                new_ids=plan.prompt_ids[plan.shared :],
                request=RequestParts(chat.head, chat.items[plan.items_shared :], plan.items_shared, chat.fixed),
                parent_id=plan.parent.call_id if plan.parent else None,
                shared=plan.shared,
                break_=plan.break_,
                kind=kind,
                agent=chat.hints.agent or "",
                body_hash=body_hash,
                sampling_asked=msgspec.to_builtins(chat.sampling),
                sampling_sent=_sent(call.request),
                hints=chat.hints.raw,
                shape=shape_of(chat, plan),
                lineage=msgspec.msgpack.encode(plan.lineage),
            )
        )
        call.begun = True
        self.metrics.began(policy, call.plan.break_.reason if call.plan.break_ else None)
        crash_point("intent.written")

    async def complete(
        self,
        call: OpenCall,
        policy: str,
        outcome: Outcome,
        choice: Choice | None,
        *,
        flaw: Flaw | None = None,
        usage: Usage | None = None,
        error: str = "",
        engine: str = "",
        logprobs_mode: str = "",
    ) -> None:
        """Returns when the completion is durable."""
        crash_point("completion")
        sampled = call.sampled
        flaw = sampled.flaw() or flaw
        kept = sampled.logprobs if flaw is not Flaw.LOGPROBS_MISSING else []
        completion = CallCompletion(
            call_id=call.id,
            finished_at=time.time(),
            outcome=outcome,
            finish=_finish(outcome, choice),
            output_ids=np.asarray(sampled.ids, np.int32),
            logprobs=np.asarray(kept, np.float32),
            versions=sampled.versions or (),
            flaw=flaw,
            message=msgspec.json.encode(choice.message) if choice is not None else b"",
            usage=msgspec.to_builtins(usage) if usage is not None else {},
            error=error,
            engine=engine,
            logprobs_mode=logprobs_mode,
            extras=sampled.aligned(),
        )
        counts = {"prompt": len(call.prompt), "cached": call.plan.shared, "output": len(sampled.ids)}
        ended: str = "unrecorded"
        try:
            await self._log.append_completion(completion)
            ended = outcome
        finally:
            self.metrics.ended(policy, ended, flaw, time.time() - call.started_at, counts)
        crash_point("completion.written")

    async def refuse(self, session_id: str, policy: str, dialect: str, body: bytes, error: RolltapError) -> None:
        """Records a request that never reached an engine. The body is kept as far as it can be read as text."""
        empty = np.empty(0, np.int32)
        intent = CallIntent(
            id=new_id(),
            session_id=session_id,
            process=self.process,
            created_at=time.time(),
            policy=policy,
            dialect=dialect,
            new_ids=empty,
            request=RequestParts(head=msgspec.json.encode({"refused": body[:65_536].decode("utf-8", "replace")})),
            kind=CallKind.AUXILIARY,
            body_hash=hashlib.sha256(body).hexdigest(),
        )
        await self._log.append_intent(intent)
        await self._log.append_completion(
            CallCompletion(
                call_id=intent.id,
                finished_at=time.time(),
                outcome=Outcome.REFUSED,
                finish=Finish.ERROR,
                output_ids=empty,
                logprobs=np.empty(0, np.float32),
                error=f"{error.code}: {error.message}",
            )
        )

    def delivered(self, calls: Sequence[OpenCall], delivered: bool) -> None:
        """Notes whether the reply reached the client; rides along with a later commit."""
        self.metrics.undelivered += 0 if delivered else len(calls)
        for call in calls:
            task = asyncio.create_task(self._deliver(call.id, delivered))
            self._deliveries.add(task)
            task.add_done_callback(self._deliveries.discard)

    async def _deliver(self, call_id: str, delivered: bool) -> None:
        try:
            await self._log.append_delivery(call_id, delivered)
        except StoreError as error:
            log.warning("call %s: its delivery could not be recorded: %s", call_id, error)

    def now(self) -> float:
        """Seconds since the epoch, as rows carry them."""
        return time.time()

    async def drain(self) -> None:
        """Waits for the deliveries under way."""
        await asyncio.gather(*self._deliveries)


def _finish(outcome: Outcome, choice: Choice | None) -> Finish:
    if outcome is Outcome.COMPLETED and choice is not None:
        return Finish(choice.finish)
    return Finish.ABORT if outcome is Outcome.ABORTED else Finish.ERROR


def _sent(request: SampleRequest | ChatCall) -> dict[str, object]:
    if isinstance(request, ChatCall):
        return {"model": request.model, **msgspec.to_builtins(request.sampling)}
    names = ("model", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed")
    return {name: getattr(request, name) for name in names} | dict(request.extra)
