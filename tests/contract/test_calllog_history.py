"""Prompts and requests, stored as what they add to their parent's, come back whole from every store."""

from __future__ import annotations

import asyncio

import pytest

from rolltap.calllog.facts import CallLog, RequestParts
from rolltap.errors import RecordCorrupt
from rolltap.ids import new_id

from ..unit.calllog.facts import a_completion, a_session, an_intent, append, ids


async def test_prompts_are_rebuilt_along_chains_branches_and_edits(log: CallLog):
    session = a_session()
    await log.open_session(session)
    root = await append(log, session, new_ids=ids(1, 2, 3), output_ids=ids(4, 5))
    child = await append(log, session, parent_id=root.id, shared=5, new_ids=ids(6), output_ids=ids(7))
    twin = await append(log, session, parent_id=root.id, shared=5, new_ids=ids(8, 9), output_ids=ids(10))
    edit = await append(log, session, parent_id=child.id, shared=2, new_ids=ids(11), output_ids=ids())
    grandchild = await append(log, session, parent_id=child.id, shared=7, new_ids=ids(12))
    alone = await append(log, session, new_ids=ids(13))
    prompts = {row.intent.id: row.prompt_ids.tolist() for row in await log.rows(session.id)}
    assert prompts == {
        root.id: [1, 2, 3],
        child.id: [1, 2, 3, 4, 5, 6],
        twin.id: [1, 2, 3, 4, 5, 8, 9],
        edit.id: [1, 2, 11],
        grandchild.id: [1, 2, 3, 4, 5, 6, 7, 12],
        alone.id: [13],
    }
    assert list(prompts) == [root.id, child.id, twin.id, edit.id, grandchild.id, alone.id]


async def test_a_conversation_of_thousands_of_calls_is_rebuilt_whole_and_in_part(log: CallLog):
    session = a_session()
    await log.open_session(session)
    parent, length, pending = None, 0, []
    for turn in range(2000):
        intent = an_intent(session, parent_id=parent, shared=length, new_ids=ids(turn))
        pending += [log.append_intent(intent), log.append_completion(a_completion(intent.id))]
        parent, length = intent.id, length + 3
    await asyncio.gather(*pending)
    rows = await log.rows(session.id)
    assert len(rows) == 2000
    expected = [token for turn in range(2000) for token in (turn, 4, 5)]
    assert all(row.prompt_ids.tolist() == expected[: 3 * turn + 1] for turn, row in enumerate(rows))
    newer = await log.rows(session.id, known={row.intent.id for row in rows[:1995]})
    assert [row.intent.id for row in newer] == [row.intent.id for row in rows[1995:]]
    assert [row.prompt_ids.tolist() for row in newer] == [row.prompt_ids.tolist() for row in rows[1995:]]


async def test_a_reader_that_knows_all_calls_gets_none(log: CallLog):
    session = a_session()
    await log.open_session(session)
    intent = await append(log, session)
    assert list(await log.rows(session.id, known=[intent.id])) == []


async def test_a_parent_comes_before_its_children_whatever_their_ids(log: CallLog):
    """Proxies on machines with different clocks make ids that don't sort by time."""
    session = a_session()
    await log.open_session(session)
    early, late = new_id(), new_id()
    await append(log, session, id=late, new_ids=ids(1), output_ids=ids(2))
    await append(log, session, id=early, parent_id=late, shared=2, new_ids=ids(3))
    rows = await log.rows(session.id)
    assert [(row.intent.id, row.prompt_ids.tolist()) for row in rows] == [(late, [1]), (early, [1, 2, 3])]
    (newer,) = await log.rows(session.id, known=[late])
    assert (newer.intent.id, newer.prompt_ids.tolist()) == (early, [1, 2, 3])


async def test_calls_of_other_sessions_stay_apart(log: CallLog):
    one, other = a_session(), a_session()
    await log.open_session(one)
    await log.open_session(other)
    calls = {session.id: [await append(log, session) for _ in range(3)] for session in (one, other)}
    for session_id, intents in calls.items():
        assert [row.intent.id for row in await log.rows(session_id)] == [intent.id for intent in intents]


async def test_the_calls_of_several_sessions_are_read_at_once_as_each_by_itself(log: CallLog):
    one, other, empty = a_session(), a_session(), a_session()
    for session in (one, other, empty):
        await log.open_session(session)
    for session in (one, other):
        root = await append(log, session, new_ids=ids(1, 2), output_ids=ids(3))
        await append(log, session, parent_id=root.id, shared=3, new_ids=ids(4), output_ids=ids(5))
    wanted = [other.id, "nobody", empty.id, one.id]
    found = await log.calls(wanted)
    assert found.keys() == {one.id, other.id, empty.id}
    for session_id, (session, calls) in found.items():
        assert session == await log.session(session_id)
        assert all([session == await log.session_of(call.id) for call in calls])
        alone = [row.call() for row in await log.rows(session_id)]
        assert [(call.id, call.prompt_ids.tolist(), call.output_ids.tolist()) for call in calls] == [
            (call.id, call.prompt_ids.tolist(), call.output_ids.tolist()) for call in alone
        ]
    await log.append_intent(an_intent(one, parent_id=root.id))  # which is of the other session
    with pytest.raises(RecordCorrupt, match="is not in the log"):
        await log.calls([one.id, other.id])


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"parent_id": "missing", "shared": 1}, "missing"), ({"shared": 4}, "shares 4"), ({"shared": -1}, "shares -1")],
)
async def test_a_call_that_does_not_fit_its_parent_is_reported(log: CallLog, changes: dict[str, object], message: str):
    session = a_session()
    await log.open_session(session)
    root = await append(log, session, new_ids=ids(1), output_ids=ids(2))
    intent = an_intent(session, **({"parent_id": root.id} | changes))
    await log.append_intent(intent)
    with pytest.raises(RecordCorrupt, match=message) as raised:
        await log.rows(session.id)
    assert intent.id in str(raised.value)


async def test_a_request_is_put_together_from_its_ancestors(log: CallLog):
    session = a_session()
    await log.open_session(session)
    items = [f'{{"turn":{turn}}}'.encode() * (1 + turn * 200) for turn in range(6)]
    tools = b'{"name":"tool"}' * 500
    root = await append(log, session, request=RequestParts(b"head 0", tuple(items[:2]), 0, {"tools": tools}))
    child = await append(
        log,
        session,
        parent_id=root.id,
        shared=5,
        request=RequestParts(b"head 1", tuple(items[2:5]), 2, {"tools": tools}),
    )
    edit = await append(
        log, session, parent_id=child.id, shared=1, request=RequestParts(b"head 2", (items[5],), 1, {"tools": b""})
    )
    assert await log.request(root.id) == RequestParts(b"head 0", tuple(items[:2]), 0, {"tools": tools})
    assert await log.request(child.id) == RequestParts(b"head 1", tuple(items[:5]), 0, {"tools": tools})
    assert await log.request(edit.id) == RequestParts(b"head 2", (items[0], items[5]), 0, {"tools": b""})


async def test_a_request_that_shares_more_than_its_parent_has_is_reported(log: CallLog):
    session = a_session()
    await log.open_session(session)
    root = await append(log, session)
    call = await append(log, session, parent_id=root.id, request=RequestParts(b"", (), 3))
    with pytest.raises(RecordCorrupt, match="shares 3 items"):
        await log.request(call.id)
