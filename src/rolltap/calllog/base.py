"""The call log: durable facts about sessions and calls, behind one narrow door.

Facts are append-only. A call is written as an intent before its engine is asked, as a completion when it ends, and
as a delivery when the proxy knows whether the reply reached the client. Prompts are stored as deltas: an intent
holds only the prompt tokens after the `shared` ones that equal its parent's prompt followed by its output, and only
the request items after the `items_shared` ones that equal the parent request's.

Invariants, held by every store and checked by the contract suite (`tests/contract/test_calllog.py`):

* `append_intent` and `append_completion` return only when the row survives `kill -9` of this process; a completion
  also survives loss of power.
* Appending the same row twice changes nothing; a different row under the same id raises `RecordCorrupt`.
* `rows` gives a session's calls in the order of their ids, a parent always before its children (the clocks of several
  proxies differ); a row whose parent is missing raises `RecordCorrupt`.
* A call that was completed as aborted on behalf of a process taken for dead is presumed aborted: should that process
  turn out to live, its own completion takes the place of the presumption.
* A store that can't write raises `StoreUnavailable`; nothing is half-written.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from rolltap.calllog.sampling import sampling_flaw, tempered
from rolltap.log_check import LogCheck
from rolltap.types import (
    NO_SHAPE,
    Break,
    Call,
    CallKind,
    CallShape,
    Finish,
    Flaw,
    Float32,
    Int32,
    Outcome,
    Session,
    VersionSpan,
)


@dataclass(frozen=True, slots=True)
class RequestParts:
    """A harness's request, cut so that its large and repeated parts are stored once.

    `head` is the JSON body without its history; `items` are the JSON texts of the history items after the first
    `items_shared` ones, which equal the parent request's byte for byte; `fixed` are large parts that recur (tool
    schemas, system text), by name. Items and fixed parts are stored by content hash.
    """

    head: bytes
    items: tuple[bytes, ...] = ()
    items_shared: int = 0
    fixed: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class CallIntent:
    """What is known before the engine is asked. `new_ids` are the prompt's tokens from `shared` on."""

    id: str
    session_id: str
    process: str  # the proxy process that made the call; its orphans are aborted when it is gone
    created_at: float
    policy: str
    dialect: str
    new_ids: Int32
    request: RequestParts
    parent_id: str | None = None
    shared: int = 0
    break_: Break | None = None
    kind: CallKind = CallKind.MAIN
    agent: str = ""
    body_hash: str = ""  # SHA-256 of the request body: an SDK's retry repeats it
    sampling_asked: Mapping[str, Any] = field(default_factory=dict)
    sampling_sent: Mapping[str, Any] = field(default_factory=dict)
    hints: Mapping[str, str] = field(default_factory=dict)  # what the harness's headers say
    shape: CallShape = NO_SHAPE  # what the request looks like beside its tokens
    lineage: bytes = b""  # opaque: what the continuation needs to rebuild its forest from the log


@dataclass(frozen=True, slots=True, eq=False)
class CallCompletion:
    """How the call ended. `message` is the assistant turn as canonical JSON (`proxy.chat.Message`)."""

    call_id: str
    finished_at: float
    outcome: Outcome
    finish: Finish
    output_ids: Int32
    logprobs: Float32
    versions: tuple[VersionSpan, ...] = ()
    flaw: Flaw | None = None
    message: bytes = b""
    usage: Mapping[str, int] = field(default_factory=dict)
    error: str = ""
    engine: str = ""
    logprobs_mode: str = ""  # "processed" (of the distribution sampled from) or "raw"
    extras: Mapping[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class CallRow:
    """Everything that the log holds of one call, with its prompt rebuilt."""

    intent: CallIntent
    prompt_ids: Int32
    completion: CallCompletion | None = None
    delivered: bool | None = None

    def call(self) -> Call:
        """The fact that the reconstructor works on; a call without completion counts as aborted."""
        intent, done = self.intent, self.completion
        empty_ids, empty_logprobs = np.empty(0, np.int32), np.empty(0, np.float32)
        return Call(
            id=intent.id,
            session_id=intent.session_id,
            prompt_ids=self.prompt_ids,
            output_ids=done.output_ids if done else empty_ids,
            logprobs=done.logprobs if done else empty_logprobs,
            versions=done.versions if done else (),
            parent_id=intent.parent_id,
            shared=intent.shared,
            outcome=done.outcome if done else Outcome.ABORTED,
            finish=done.finish if done else Finish.ABORT,
            kind=intent.kind,
            policy=intent.policy,
            agent=intent.agent,
            break_=intent.break_,
            flaw=done.flaw if done else None,
            sampling_flaw=sampling_flaw(intent.sampling_sent, done.logprobs_mode, done.extras) if done else None,
            delivered=self.delivered,
            shape=intent.shape,
            extras={**done.extras, **tempered(intent.sampling_sent, len(done.output_ids))} if done else {},
        )


@dataclass(frozen=True, slots=True)
class Condition:
    """How a call log is now. `spool`: whether it has room for a new call; None if there is no spool."""

    store: bool  # answers, and takes what is written
    spool: bool | None = None

    @property
    def takes_calls(self) -> bool:
        """Whether a new call can be recorded."""
        return self.store or bool(self.spool)


class CallLog(Protocol):
    """What the proxy, the ledger and the exporters ask of a store."""

    async def start(self) -> None:
        """Opens the store and brings its schema up to date; `StoreUnavailable` or `ConfigError` says why not."""
        ...

    async def close(self) -> None:
        """Writes what is queued and lets go of the store."""
        ...

    async def condition(self) -> Condition:
        """How it is now; asks the store, and waits for its answer for no more than 2 s."""
        ...

    async def open_session(self, session: Session) -> None: ...

    async def claim_session(self, session: Session) -> Session:
        """The session of this key: the one that a process opened before, else `session`, opened now.

        Processes that claim one key at once all get the same session. Unlike an opening, this needs the store.
        """
        ...

    async def close_session(self, session_id: str, at: float) -> None: ...

    async def set_log_check(self, session_id: str, check: LogCheck) -> LogCheck:
        """What stands on the session: `check`, or the earlier one where there is one. `NotFound`."""
        ...

    async def session(self, session_id: str) -> Session | None: ...

    async def session_by_key(self, key_hash: str) -> Session | None: ...

    async def session_of(self, call_id: str) -> Session | None:
        """The session that made a call; None if no call has this id."""
        ...

    async def sessions(self, *, limit: int = 100, before: str | None = None) -> Sequence[Session]:
        """The newest sessions first; `before` is the last id of the former page."""
        ...

    async def append_intent(self, intent: CallIntent) -> None: ...

    async def append_completion(self, completion: CallCompletion) -> None: ...

    def append_delivery(self, call_id: str, delivered: bool) -> asyncio.Future[None]:
        """The future ends when the delivery is written, which may take a while.

        A reply that reached its client once has arrived, whatever is recorded of other attempts.
        """
        ...

    async def rows(self, session_id: str, *, known: Collection[str] = ()) -> Sequence[CallRow]:
        """The session's calls in order, but those whose ids are `known`; their prompts are complete all the same.

        `known` are calls of this session that are in the log. A reader that follows a session passes the calls that it
        has with their completions. A greatest id would not do: another proxy may still be writing a call with a smaller
        one.
        """
        ...

    async def calls(self, session_ids: Sequence[str]) -> Mapping[str, tuple[Session, Sequence[Call]]]:
        """What the reconstructor works on: the sessions, each with its calls in order; unknown ids are left out.

        The requests are not read, so this costs the tokens only.
        """
        ...

    async def request(self, call_id: str) -> RequestParts:
        """The call's request with all its items (`items_shared` is 0)."""
        ...

    def all_sessions(self) -> AsyncIterator[Session]:
        """Every session, oldest first, streamed."""
        ...

    async def abort_orphans(self, live: Sequence[str], *, at: float) -> int:
        """Completes as aborted every intent whose process is gone and not among `live`; returns how many.

        Where only one process can write (SQLite), every other one is gone; on Postgres one is gone that has shown no
        sign of life for a while, and the log also does this by itself from time to time.
        """
        ...
