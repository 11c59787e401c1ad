"""Forks in every store: a fork's first calls continue calls of its origin, whose tokens are stored once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from rolltap.calllog.facts import CallLog, CallRow
from rolltap.errors import RecordCorrupt
from rolltap.types import Origin, Session, VersionSpan

from ..unit.calllog.facts import a_completion, a_session, an_intent, append, ids
from .conftest import LASTING, Store


async def two_turns(log: CallLog, session: Session) -> tuple[str, str]:
    """A session of two calls: prompts 1 2 3 and 1 2 3 4 5 6, replies 4 5 and 7 8."""
    await log.open_session(session)
    first = await append(log, session)
    second = await append(log, session, parent_id=first.id, shared=5, new_ids=ids(6), output_ids=ids(7, 8))
    return first.id, second.id


async def forked(log: CallLog, origin: Origin, **changes: object) -> Session:
    fork = a_session(origin=origin, rollout_id=None, **changes)
    await log.open_session(fork)
    return fork


def tokens(rows: Sequence[CallRow]) -> list[tuple[list[int], list[int], str]]:
    ended = [(row, row.completion) for row in rows if row.completion is not None]
    assert len(ended) == len(rows)
    return [(row.prompt_ids.tolist(), done.output_ids.tolist(), row.sampled_by) for row, done in ended]


async def test_a_fork_keeps_its_origin_and_its_calls_continue_that_one_s_tokens(log: CallLog):
    session = a_session()
    first, second = await two_turns(log, session)
    whole, inside = Origin(session.id, second), Origin(session.id, second, 1)
    fork, other = await forked(log, whole), await forked(log, inside)
    assert (await log.session(fork.id), await log.session(other.id)) == (fork, other)
    turns = [([1, 2, 3], [4, 5], "rollout"), ([1, 2, 3, 4, 5, 6], [7, 8], "rollout")]
    assert tokens(await log.chain(whole)) == turns
    assert tokens(await log.chain(inside)) == [turns[0], ([1, 2, 3, 4, 5, 6], [7], "rollout")]
    assert tokens(await log.chain(Origin(session.id, first))) == turns[:1]

    child = await append(log, fork, parent_id=second, shared=8, new_ids=ids(9), output_ids=ids(10))
    await append(log, fork, parent_id=child.id, shared=10, new_ids=ids(11))
    await append(log, other, parent_id=second, shared=7, new_ids=ids(), output_ids=ids(20))
    own = [([1, 2, 3, 4, 5, 6, 7, 8, 9], [10], ""), ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [4, 5], "")]
    assert tokens(await log.rows(fork.id)) == own
    assert tokens(await log.rows(fork.id, known=[child.id])) == own[1:]
    assert tokens(await log.rows(other.id)) == [([1, 2, 3, 4, 5, 6, 7], [20], "")]
    calls = await log.calls([fork.id, other.id, session.id])
    assert [(call.prompt_ids.tolist(), call.sampled_by) for call in calls[fork.id][1]] == [
        (prompt, by) for prompt, _, by in [*turns, *own]
    ]
    assert [call.output_ids.tolist() for call in calls[other.id][1]] == [[4, 5], [7], [20]]
    assert [call.sampled_by for call in calls[session.id][1]] == ["", ""]


async def test_the_reply_that_a_fork_begins_in_is_cut_with_all_its_arrays(log: CallLog):
    session = a_session(rollout_id=None)
    await log.open_session(session)
    intent = an_intent(session)
    await log.append_intent(intent)
    spans, extras = (VersionSpan(3, 0, 2), VersionSpan(4, 2, 4)), {"entropy": np.arange(4, dtype=np.float32)}
    logprobs = np.full(4, -0.5, np.float32)
    done = a_completion(
        intent.id, output_ids=ids(4, 5, 6, 7), logprobs=logprobs, versions=spans, message=b"{}", extras=extras
    )
    await log.append_completion(done)
    for at, kept in ((0, ()), (1, (VersionSpan(3, 0, 1),)), (3, (VersionSpan(3, 0, 2), VersionSpan(4, 2, 3)))):
        (row,) = await log.chain(Origin(session.id, intent.id, at))
        cut = row.completion
        assert cut is not None
        assert (cut.versions, cut.message, len(cut.output_ids), len(cut.logprobs)) == (kept, b"", at, at)
        assert row.call().extras["entropy"].tolist() == [0.0, 1.0, 2.0, 3.0][:at]
        assert row.sampled_by == session.id


async def test_a_fork_of_a_fork_has_the_calls_of_both(log: CallLog):
    session = a_session()
    _, second = await two_turns(log, session)
    fork = await forked(log, Origin(session.id, second))
    child = await append(log, fork, parent_id=second, shared=8, new_ids=ids(9), output_ids=ids(10))
    deeper = await forked(log, origin := Origin(fork.id, child.id))
    await append(log, deeper, parent_id=child.id, shared=10, new_ids=ids(11))
    assert [by for _, _, by in tokens(await log.chain(origin))] == ["rollout", "rollout", fork.id]
    assert tokens(await log.rows(deeper.id)) == [([*range(1, 12)], [4, 5], "")]
    ((_, calls),) = (await log.calls([deeper.id])).values()
    assert [len(call.prompt_ids) for call in calls] == [3, 6, 9, 11]


async def test_a_fork_of_a_fork_inside_a_reply_has_the_kept_tokens_of_both(log: CallLog):
    session = a_session()
    _, second = await two_turns(log, session)
    fork = await forked(log, Origin(session.id, second, 1))
    child = await append(log, fork, parent_id=second, shared=7, new_ids=ids(), output_ids=ids(20, 21, 22))
    deeper = await forked(log, Origin(fork.id, child.id, 2))
    own = await append(log, deeper, parent_id=child.id, shared=9, new_ids=ids(), output_ids=ids(30))
    turns = [([1, 2, 3], [4, 5]), ([*range(1, 7)], [7]), ([*range(1, 8)], [20, 21]), ([*range(1, 8), 20, 21], [30])]
    ((_, calls),) = (await log.calls([deeper.id])).values()
    assert [(call.prompt_ids.tolist(), call.output_ids.tolist()) for call in calls] == turns
    chain = tokens(await log.chain(Origin(deeper.id, own.id)))
    assert [(prompt, output) for prompt, output, _ in chain] == turns


async def test_a_parent_of_another_session_is_an_error_unless_it_is_before_the_fork(log: CallLog):
    session = a_session()
    first, second = await two_turns(log, session)
    stranger, early = a_session(), await forked(log, Origin(session.id, first))
    await log.open_session(stranger)
    await append(log, stranger, parent_id=first, shared=5)
    await append(log, early, parent_id=second, shared=8)
    for wrong in (stranger, early):
        with pytest.raises(RecordCorrupt, match="is not in the log"):
            await log.rows(wrong.id)
    with pytest.raises(RecordCorrupt, match="is not in the log"):
        await log.chain(Origin(session.id, "nothing"))


@pytest.mark.parametrize("store", LASTING, indirect=True)
async def test_another_process_reads_a_fork_and_its_origin_after_a_restart(store: Store):
    log = store.open()
    await log.start()
    session = a_session()
    _, second = await two_turns(log, session)
    fork = await forked(log, Origin(session.id, second, 1))
    await log.close()
    again = store.open()
    await again.start()
    assert await again.session_by_key(fork.key_hash) == fork
    await append(again, fork, parent_id=second, shared=7, new_ids=ids(9))
    assert tokens(await again.rows(fork.id)) == [([1, 2, 3, 4, 5, 6, 7, 9], [4, 5], "")]
    await again.open_session(fork)  # once more: the same fact
    await again.close()


async def test_a_fork_with_another_origin_is_another_session(store: Store, log: CallLog, caplog):
    session = a_session()
    first, second = await two_turns(log, session)
    fork = await forked(log, Origin(session.id, second))
    other = replace(fork, origin=Origin(session.id, first))
    await store.refuses(log, log.open_session(other), fork.id, caplog)
