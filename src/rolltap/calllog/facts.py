"""The call log: durable facts about sessions and calls, behind one narrow interface.

Facts are append-only. A call has an intent row, written before its engine is asked (in chat mode: when the upstream has
reported its prompt, at the latest with the completion); a completion row, written when it ends; and a delivery row,
written when the proxy knows whether the reply reached the client. Prompts are stored as deltas: the first `shared`
prompt tokens equal the parent's prompt and output, and the intent holds only the rest. The same holds for request items
and `items_shared`.

Invariants, held by every store and checked by the contract suite (`tests/contract/test_calllog.py`):

* `append_intent` and `append_completion` return only when the row survives `kill -9` of this process; a completion
  also survives loss of power.
* Appending the same row twice has no effect; a different row with the same id raises `RecordCorrupt`.
* `rows` returns a session's calls in the order of their ids, but a parent always before its children (the clocks of
  several proxies differ). A row without its parent raises `RecordCorrupt`.
* The calls of a process that seems dead are completed as presumed aborted. If that process is alive after all, its own
  completion replaces the presumed one.
* A parent is of the same session or, in a fork, one of the calls of its origin (`chain`).
* A store that cannot write raises `StoreUnavailable`. No row is written partially.

`sampling_flaw` decides from the sampling parameters of a call whether a trainer can compute its log-probs. A trainer
computes log-probs at the segment's temperature, over the whole vocabulary or over the ids of the sampling mask. The
recorded log-probs must come from the same distribution. Otherwise every ratio is wrong, without any other sign.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Protocol

import numpy as np

from rolltap.errors import RecordCorrupt
from rolltap.token_masks import MASK_ROWS, SAMPLING_MASK, per_token
from rolltap.types import (
    NO_SHAPE,
    Break,
    Call,
    CallKind,
    CallShape,
    Finish,
    Flaw,
    Float32,
    InjectedMessage,
    Int32,
    LogCheck,
    Origin,
    Outcome,
    PromptImage,
    SamplingFlaw,
    Session,
    VersionSpan,
)


@dataclass(frozen=True, slots=True)
class RequestParts:
    """A harness's request, split so that large and repeated parts are stored once.

    `head`: the JSON body without its history. `items_shared`: the number of leading history items that equal the parent
    request's byte for byte. `items`: the JSON texts of the other history items. `fixed`: large recurring parts (tool
    schemas, system text), by name. Items and fixed parts are stored by content hash. `images`: the files of the images
    in a prompt that the parent's has not. Each is stored by its hash, and cut out of the items that hold it as base64.
    """

    head: bytes
    items: tuple[bytes, ...] = ()
    items_shared: int = 0
    fixed: Mapping[str, bytes] = field(default_factory=dict)
    images: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class CallIntent:
    """The facts known before the engine is asked, or in chat mode, when the upstream has reported its prompt.

    `new_ids` are the prompt's tokens from index `shared` on.
    """

    id: str
    session_id: str
    process: str  # the proxy process of the call; its open calls are aborted if it dies
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
    body_hash: str = ""  # SHA-256 of the request's body, route and query: an SDK's retry repeats it
    sampling_asked: Mapping[str, Any] = field(default_factory=dict)
    sampling_sent: Mapping[str, Any] = field(default_factory=dict)
    hints: Mapping[str, str] = field(default_factory=dict)  # from the harness's headers
    shape: CallShape = NO_SHAPE  # features of the request beside its tokens
    lineage: bytes = b""  # opaque: continuation rebuilds its forest from it
    injected: tuple[InjectedMessage, ...] = ()
    # `injected`: by the session's rules; of a call without a break only those that its parent does not have
    images: tuple[PromptImage, ...] = ()  # all of the prompt's


@dataclass(frozen=True, slots=True, eq=False)
class CallCompletion:
    """How the call ended.

    `message` is the assistant's message as canonical JSON (`rolltap.protocols.conversation.Message`).
    """

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
    error: str = ""  # why it failed; of a completed call: what is to be known of its reply
    engine: str = ""
    logprobs_mode: str = ""  # "processed" (of the distribution sampled from) or "raw"
    extras: Mapping[str, np.ndarray] = field(default_factory=dict)
    masked: tuple[tuple[int, int], ...] = ()  # spans of the output that the session's rules leave without loss


@dataclass(frozen=True, slots=True, eq=False)
class CallRow:
    """All facts about one call, with its complete prompt. `sampled_by`: see `Call`."""

    intent: CallIntent
    prompt_ids: Int32
    completion: CallCompletion | None = None
    delivered: bool | None = None
    sampled_by: str = ""

    def token_counts(self) -> tuple[int, int]:
        """See `token_counts`."""
        done = self.completion
        return token_counts(len(self.prompt_ids), len(done.output_ids) if done else 0, done.usage if done else {})

    def call(self) -> Call:
        """The call in the reconstructor's form. A call without completion counts as aborted."""
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
            remark=done.error if done and done.outcome is Outcome.COMPLETED else "",
            sampling_flaw=sampling_flaw(intent.sampling_sent, done.logprobs_mode, done.extras) if done else None,
            delivered=self.delivered,
            shape=intent.shape,
            extras={**done.extras, **tempered(intent.sampling_sent, len(done.output_ids))} if done else {},
            masked=done.masked if done else (),
            sampled_by=self.sampled_by,
            images=intent.images,
        )

    def cut(self, at: int) -> CallRow:
        """The call with only the first `at` tokens of its reply, and without its message."""
        done = self.completion
        if done is None:
            return self
        completion = replace(
            done,
            output_ids=done.output_ids[:at],
            logprobs=done.logprobs[:at],
            versions=until(done.versions, at),
            message=b"",
            extras=per_token(done.extras, lambda _, array: array[:at]),
            masked=tuple((start, min(end, at)) for start, end in done.masked if start < at),
        )
        return replace(self, completion=completion)


def until(versions: Sequence[VersionSpan], end: int) -> tuple[VersionSpan, ...]:
    """The spans up to the `end`-th token."""
    cut = [VersionSpan(span.version, span.start, min(span.end, end)) for span in versions]
    return tuple(span for span in cut if span.start < span.end)


def token_counts(prompt_ids: int, output_ids: int, usage: Mapping[str, int]) -> tuple[int, int]:
    """How many tokens a prompt and its output have: their ids on record or, without any, the upstream's own counts."""
    if prompt_ids or output_ids:
        return prompt_ids, output_ids
    return usage.get("prompt", 0), usage.get("output", 0)


CLOCK_OFF_S = 2.0
"""Difference of clocks that is reported. What expires is decided by the store's clock; ids and logs have this one's."""


@dataclass(frozen=True, slots=True)
class LogCondition:
    """The current state of a call log. `spool`: it has room for a new call; None if there is no spool."""

    store: bool  # the store answers and accepts writes
    spool: bool | None = None
    clock_ahead_s: float = field(default=0.0, compare=False)  # how far this machine's clock is ahead of the store's
    spool_s: float = field(default=0.0, compare=False)  # how long facts have gone to the spool, or waited in it

    @property
    def clock_is_off(self) -> bool:
        return abs(self.clock_ahead_s) > CLOCK_OFF_S

    @property
    def takes_calls(self) -> bool:
        """Whether a new call can be recorded."""
        return self.store or bool(self.spool)


class CallLog(Protocol):
    """A store of sessions and calls, used by the proxy, the ledger and the exporters."""

    async def start(self) -> None:
        """Opens the store and upgrades its schema. Raises `StoreUnavailable` or `ConfigError`."""
        ...

    async def close(self) -> None:
        """Writes queued facts and closes the store."""
        ...

    async def condition(self) -> LogCondition:
        """The current state. Asks the store and waits at most 2 s for its answer."""
        ...

    async def open_session(self, session: Session) -> None: ...

    async def claim_session(self, session: Session) -> Session:
        """The session with this key: the existing one, or else `session`, opened now.

        Processes that claim the same key at once all get the same session. Unlike `open_session`, this needs the store
        (the spool is not enough).
        """
        ...

    async def close_session(self, session_id: str, at: float) -> None: ...

    async def set_log_check(self, session_id: str, check: LogCheck) -> LogCheck:
        """Stores the session's log check unless it has one; returns the stored one. Raises `NotFound`."""
        ...

    async def session(self, session_id: str) -> Session | None: ...

    async def session_by_key(self, key_hash: str) -> Session | None: ...

    async def session_of(self, call_id: str) -> Session | None:
        """The session of a call; None if no call has this id."""
        ...

    async def sessions(self, *, limit: int = 100, before: str | None = None) -> Sequence[Session]:
        """A page of sessions, the newest first. `before` is the last id of the previous page."""
        ...

    async def append_intent(self, intent: CallIntent) -> None: ...

    async def append_completion(self, completion: CallCompletion) -> None: ...

    def append_delivery(self, call_id: str, delivered: bool) -> asyncio.Future[None]:
        """Records whether a reply reached its client. The future ends when the row is written, which may take a while.

        A delivered reply stays delivered: a later row for a failed attempt does not change it.
        """
        ...

    async def rows(self, session_id: str, *, known: Collection[str] = ()) -> Sequence[CallRow]:
        """The session's calls in order, with complete prompts, without the calls in `known`.

        `known` holds ids of this session's calls in the log. A reader that follows a session passes the calls whose
        completions it has. The greatest known id would not be enough: another proxy may still write a smaller one.
        """
        ...

    async def chain(self, origin: Origin) -> Sequence[CallRow]:
        """The call that a fork begins after, and the calls before it: its recorded parent, that one's, and so on. The
        first call comes first. The last reply is cut at `origin.at`, and so is one inside which an earlier fork began.

        Raises `RecordCorrupt` if the call, or one before it, is not in the log.
        """
        ...

    async def calls(self, session_ids: Sequence[str]) -> Mapping[str, tuple[Session, Sequence[Call]]]:
        """The sessions, each with its calls in order, for the reconstructor. Unknown ids are left out.

        The calls of a fork begin with those of its origin (`chain`).

        Does not read the requests, so the cost is proportional to the tokens.
        """
        ...

    async def request(self, call_id: str) -> RequestParts:
        """The call's request with all its items (`items_shared` is 0)."""
        ...

    async def images(self, digests: Collection[str]) -> Mapping[str, bytes]:
        """The files of images by `PromptImage.digest`. Those that are not in the log are left out."""
        ...

    def all_sessions(self) -> AsyncIterator[Session]:
        """All sessions, the oldest first, streamed."""
        ...

    async def may_lack_facts(self, since: float) -> bool:
        """Whether other processes may have durable facts from before `since` (by `time.monotonic`) that this one can't
        read now. Each says at least once a second that it has none."""
        ...

    async def vanished(self, since: float) -> Sequence[str]:
        """The processes that died after `since` (seconds since the epoch) and were not started again on their data
        folder: nobody knows what they had outside the store."""
        ...

    async def abort_orphans(self, live: Sequence[str], *, at: float) -> int:
        """Completes the open calls of dead processes as aborted; returns their number.

        On SQLite only one process can write, so all processes not in `live` are dead. On Postgres a process is dead if
        its heartbeat is missing for a while; there the log also does this by itself from time to time.
        """
        ...


@dataclass(frozen=True, slots=True)
class Delivery:
    """Whether a call's reply reached its client."""

    call_id: str
    delivered: bool


Fact = Session | CallIntent | CallCompletion | Delivery


def name_of(fact: Fact) -> str:
    match fact:
        case CallIntent(id=call_id):
            return f"the intent of call {call_id}"
        case CallCompletion(call_id=call_id):
            return f"the completion of call {call_id}"
        case Delivery(call_id=call_id):
            return f"the delivery of call {call_id}"
        case Session(id=session_id):
            return f"session {session_id}"


def aborted(call_id: str, at: float) -> CallCompletion:
    """The completion of a call whose process ended before the call."""
    return CallCompletion(
        call_id=call_id,
        finished_at=at,
        outcome=Outcome.ABORTED,
        finish=Finish.ABORT,
        output_ids=np.empty(0, np.int32),
        logprobs=np.empty(0, np.float32),
        error="the proxy process ended before the call was complete",
    )


def extend_items(call_id: str, items: tuple[bytes, ...], request: RequestParts) -> tuple[bytes, ...]:
    """All items of a request, given the `items` of its parent's request."""
    if request.items_shared > len(items):
        raise RecordCorrupt(f"call {call_id}: shares {request.items_shared} items, but its parent has {len(items)}")
    return items[: request.items_shared] + request.items


def all_injected(intent: CallIntent, of_parent: tuple[InjectedMessage, ...]) -> tuple[InjectedMessage, ...]:
    """All messages that rules put into a call's prompt, in order, given those of its parent's."""
    if intent.break_ is not None or intent.parent_id is None:
        return intent.injected
    first = min((each.place for each in intent.injected), default=None)
    return tuple(each for each in of_parent if first is None or each.place < first) + intent.injected


def same_fact(first: Any, second: Any) -> bool:
    """Whether two facts are equal, arrays bit for bit (NaNs included)."""
    if isinstance(first, np.ndarray) or isinstance(second, np.ndarray):
        first, second = np.asarray(first), np.asarray(second)
        same_layout = first.dtype == second.dtype and first.shape == second.shape
        return same_layout and first.tobytes() == second.tobytes()
    if is_dataclass(first) and type(first) is type(second):
        return all(same_fact(getattr(first, field.name), getattr(second, field.name)) for field in fields(first))
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(same_fact(first[key], second[key]) for key in first)
    return first == second


CUTS: Mapping[str, tuple[Any, ...]] = {"top_p": (1.0,), "top_k": (0, -1), "min_p": (0.0,)}
"""Parameters that truncate the vocabulary, with the values that do not."""

PENALTIES: Mapping[str, tuple[Any, ...]] = {
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
}
"""Parameters that change the probability of tokens in the context, with the values that do not."""


def sampling_flaw(
    sent: Mapping[str, Any], logprobs_mode: str, extras: Mapping[str, np.ndarray] | None = None
) -> SamplingFlaw | None:
    """Why a trainer cannot compute the log-probs of a call that was sampled as `sent`; None if it can.

    `extras` are the call's optional arrays.
    """
    temperature = temperature_of(sent)
    masked = not {SAMPLING_MASK, MASK_ROWS}.isdisjoint(extras or {})
    replayed = logprobs_mode == "processed" and masked
    if MASK_ROWS in (extras or {}) and not replayed:
        return SamplingFlaw.TRUNCATED
    if temperature <= 0 or _differs(sent, PENALTIES) or (_differs(sent, CUTS) and not replayed):
        return SamplingFlaw.TRUNCATED
    if temperature != 1.0 and logprobs_mode != "processed":
        return SamplingFlaw.UNTEMPERED
    return None


def _differs(sent: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]]) -> bool:
    return any(sent.get(name) is not None and sent[name] not in values for name, values in neutral.items())


def tempered(sent: Mapping[str, Any], tokens: int) -> dict[str, np.ndarray]:
    """The extra array `temperature`, if the call was sampled at a temperature other than 1."""
    temperature = temperature_of(sent)
    return {} if temperature == 1.0 or not tokens else {"temperature": np.full(tokens, temperature, np.float32)}


def temperature_of(sent: Mapping[str, Any]) -> float:
    """The sampling temperature; 1 if none was sent."""
    value = sent.get("temperature")
    return float(value) if isinstance(value, int | float) else 1.0
