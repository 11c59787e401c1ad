"""The proof of a session: each trained token against the scripted engine's own journal.

The journal knows nothing of messages: it holds the ids that the engine was sent and sampled. The log-prob of a token is
a function of its id and place (`logprob_of`), so that it need not be kept to be known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from rolltap.calllog.facts import CallRow
from rolltap.engine.scripted import Entry, logprob_of
from rolltap.protocols.conversation import Message
from rolltap.types import CallKind, Origin, Outcome, Segment, Trajectory


@dataclass(frozen=True)
class SessionProof:
    """What a session came to.

    `continuing` counts the main calls that resend a recorded turn, `bridged` those of them whose prompt is, token for
    token, their parent's prompt and output and something new. `masked_calls` are those of which a rule of the session
    masks all tokens. `violations` are sentences, `errors` the messages of
    calls that failed.
    """

    calls: int
    main: int
    continuing: int
    bridged: int
    trained_calls: int
    trained_tokens: int
    breaks: dict[str, int] = field(default_factory=dict)
    flaws: dict[str, int] = field(default_factory=dict)
    errors: tuple[str, ...] = ()
    violations: tuple[str, ...] = ()
    masked_calls: int = 0
    handles: tuple[str, ...] = ()
    """Ids of our own that stand in a prompt: a model is to see those that it sampled, or such as its family has."""


def prove(
    rows: Sequence[CallRow],
    trajectory: Trajectory,
    journal: Sequence[Entry],
    decode: Callable[[list[int]], str],
    *,
    origin: Origin | None = None,
    before: Sequence[CallRow] = (),
) -> SessionProof:
    """`rows` are the session's calls in the store, `journal` the engine's entries of the session.

    Of a fork, `before` are the calls of the sessions from which it comes, whose entries are in `journal`, too.
    """
    asked = {entry.id: entry for entry in journal}
    kinds = {one.call_id: one.kind for one in trajectory.classifications}
    completed = [row for row in rows if row.completion and row.completion.outcome is Outcome.COMPLETED]
    main = [row for row in completed if kinds.get(row.intent.id) is CallKind.MAIN]
    by_id = {row.intent.id: row for row in (*before, *completed)}
    reasons = Counter(row.intent.break_.reason.value for row in main if row.intent.break_)
    violations = [*_call_violations(completed, asked), *_segment_violations(trajectory, asked, by_id)]
    strays = asked.keys() - {row.intent.id for row in (*before, *rows)}
    return SessionProof(
        calls=len(rows),
        main=len(main),
        continuing=sum(row.intent.parent_id is not None for row in main),
        bridged=sum(_is_bridged(row, by_id, origin) for row in main),
        trained_calls=sum(turn.trained for segment in trajectory.segments for turn in segment.turns),
        trained_tokens=sum(int(segment.loss_mask.sum()) for segment in trajectory.segments),
        breaks=dict(reasons),
        flaws=dict(Counter(row.completion.flaw.value for row in completed if row.completion and row.completion.flaw)),
        errors=tuple(row.completion.error for row in rows if row.completion and row.completion.error),
        masked_calls=sum(not _unmasked(row, len(row.completion.output_ids)).any() for row in main if row.completion),
        violations=(*violations, *(f"the engine was asked for {stray}, which is not on record" for stray in strays)),
        handles=tuple(_handles(completed, [decode(entry.prompt_ids) for entry in journal])),
    )


def _handles(completed: Sequence[CallRow], prompts: Sequence[str]) -> Iterator[str]:
    for row in completed:
        assert row.completion is not None
        message = msgspec.json.decode(row.completion.message, type=Message)
        yield from (call.id for call in message.tool_calls if any(call.id in prompt for prompt in prompts))


def _is_bridged(row: CallRow, completed: dict[str, CallRow], origin: Origin | None) -> bool:
    parent = completed.get(row.intent.parent_id or "")
    if parent is None or parent.completion is None or row.intent.break_ is not None:
        return False
    kept = origin.at if origin is not None and origin.call_id == parent.intent.id else None
    context = np.concatenate([parent.prompt_ids, parent.completion.output_ids[:kept]])
    return np.array_equal(row.prompt_ids[: len(context)], context)


def _call_violations(completed: Sequence[CallRow], asked: dict[str, Entry]) -> Iterator[str]:
    for row in completed:
        entry, done = asked.get(row.intent.id), row.completion
        assert done is not None
        if entry is None:
            yield f"call {row.intent.id} never reached the engine"
            continue
        if row.prompt_ids.tolist() != entry.prompt_ids:
            yield f"call {row.intent.id} has another prompt than the engine saw"
        if done.output_ids.tolist() != entry.output[: len(done.output_ids)]:
            yield f"call {row.intent.id} has other tokens than the engine sampled"
        if not np.array_equal(done.logprobs, _logprobs(done.output_ids.tolist())):
            yield f"call {row.intent.id} has other log-probs than the engine gave"
        if row.intent.break_ is None and row.intent.parent_id is not None and entry.extends is False:
            yield f"call {row.intent.id} has no break, and the engine saw one"


def _segment_violations(
    trajectory: Trajectory, asked: dict[str, Entry], completed: dict[str, CallRow]
) -> Iterator[str]:
    for number, segment in enumerate(trajectory.segments):
        mask = np.zeros(len(segment), bool)
        logprobs = np.zeros(len(segment), np.float32)
        for turn in segment.turns:
            entry = asked.get(turn.call_id)
            if entry is None:
                yield f"segment {number} holds call {turn.call_id}, which never reached the engine"
                continue
            sampled = segment.token_ids[turn.start : turn.end].tolist()
            if segment.token_ids[: turn.start].tolist() != entry.prompt_ids:
                yield f"segment {number}: call {turn.call_id} stands behind another prompt than the engine saw"
            if sampled != entry.output[: len(sampled)]:
                yield f"segment {number}: call {turn.call_id} has other tokens than the engine sampled"
            if turn.trained:
                mask[turn.start : turn.end] = _unmasked(completed[turn.call_id], len(sampled))
                logprobs[turn.start : turn.end] = _logprobs(sampled)
        yield from _array_violations(number, segment, mask, np.where(mask, logprobs, 0))


def _unmasked(row: CallRow, size: int) -> np.ndarray:
    """Which of the call's tokens no rule of the session masks."""
    unmasked = np.ones(size, bool)
    assert row.completion is not None
    for start, end in row.completion.masked:
        unmasked[start:end] = False
    return unmasked


def _array_violations(number: int, segment: Segment, mask: np.ndarray, logprobs: np.ndarray) -> Iterator[str]:
    if not np.array_equal(segment.loss_mask, mask):
        yield f"segment {number}: the loss mask is not that of the sampled tokens"
    if not np.array_equal(np.where(mask, segment.logprobs, 0), logprobs):
        yield f"segment {number}: log-probs are not the engine's"


def _logprobs(sampled: Sequence[int]) -> np.ndarray:
    return np.asarray([logprob_of(token, at) for at, token in enumerate(sampled)], np.float32)
