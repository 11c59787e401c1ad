"""Facts as bytes: they come back equal, and damage is reported."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rolltap.calllog.codec import (
    EncodedFact,
    encode_fact,
    pack_fact,
    read_completion,
    read_delivery,
    read_intent,
    read_session,
    unpack_fact,
)
from rolltap.calllog.facts import CallCompletion, CallIntent, Delivery, Fact, RequestParts, same_fact
from rolltap.errors import RecordCorrupt
from rolltap.types import Break, BreakReason, CallKind, Finish, Flaw, InjectedMessage, Outcome, Session, VersionSpan

from .facts import a_completion, an_intent

names = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
times = st.floats(0, 1e12)
bodies = st.binary(max_size=50) | st.binary(max_size=30).map(lambda part: part * 100)
int32s = hnp.arrays(np.int32, st.integers(0, 60))
float32s = hnp.arrays(np.float32, st.integers(0, 60), elements=st.floats(width=32))
counts = st.integers(0, 2**31 - 1)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | texts, lambda x: st.lists(x, max_size=3)
)

requests = st.builds(
    RequestParts,
    head=bodies,
    items=st.lists(bodies, max_size=4).map(tuple),
    items_shared=counts,
    fixed=st.dictionaries(texts, bodies, max_size=2),
)
breaks = st.builds(Break, st.sampled_from(BreakReason), names, st.none() | names, counts, st.none() | counts)
intents = st.builds(
    CallIntent,
    id=names,
    session_id=names,
    process=names,
    created_at=times,
    policy=names,
    dialect=texts,
    new_ids=int32s,
    request=requests,
    parent_id=st.none() | names,
    shared=counts,
    break_=st.none() | breaks,
    kind=st.sampled_from(CallKind),
    agent=names,
    body_hash=texts,
    sampling_asked=st.dictionaries(texts, plain, max_size=3),
    sampling_sent=st.dictionaries(texts, plain, max_size=3),
    hints=st.dictionaries(texts, texts, max_size=3),
    lineage=bodies,
    injected=st.lists(st.builds(InjectedMessage, counts, counts, texts, texts, counts), max_size=3).map(tuple),
)
completions = st.builds(
    CallCompletion,
    call_id=names,
    finished_at=times,
    outcome=st.sampled_from(Outcome),
    finish=st.sampled_from(Finish),
    output_ids=int32s,
    logprobs=float32s,
    versions=st.lists(st.builds(VersionSpan, counts, counts, counts), max_size=3).map(tuple),
    flaw=st.none() | st.sampled_from(Flaw),
    message=bodies,
    usage=st.dictionaries(texts, counts, max_size=3),
    error=texts,
    engine=texts,
    logprobs_mode=texts,
    extras=st.dictionaries(texts, int32s, max_size=2),
    masked=st.lists(st.tuples(counts, counts), max_size=3).map(tuple),
)
sessions = st.builds(
    Session, names, names, names, times, times, st.none() | names, st.none() | times, st.dictionaries(texts, texts)
)
facts: st.SearchStrategy[Fact] = intents | completions | sessions | st.builds(Delivery, names, st.booleans())


def decoded(fact: EncodedFact) -> Fact:
    match fact.table.name:
        case "call_intents":
            return read_intent(fact.row, fact.parts)
        case "call_completions":
            return read_completion(fact.row)
        case "deliveries":
            return read_delivery(fact.row)
        case _:
            return read_session(fact.row)


def test_a_version_that_no_token_can_carry_is_read_as_unknown():
    """It is on record where a server counted its weights by the clock."""
    done = a_completion("a", versions=(VersionSpan(2**31, 0, 2),))
    assert same_fact(decoded(encode_fact(done)), a_completion("a"))


@given(facts)
def test_facts_come_back(fact: Fact):
    assert same_fact(decoded(unpack_fact(pack_fact(encode_fact(fact)))), fact)


def test_parts_that_the_reader_has_already_can_be_left_out():
    fact = encode_fact(an_intent("session", request=RequestParts(b"", (b"x" * 2000, b"y" * 3000))))
    first, second = fact.parts
    packed = pack_fact(fact, {first})
    assert unpack_fact(packed).parts == {second: fact.parts[second]}
    assert unpack_fact(packed).row == fact.row


@given(facts, st.data())
def test_a_changed_row_is_never_taken_for_the_fact(fact: Fact, data: st.DataObject):
    """Intents and completions carry a checksum; a changed key of a session or delivery is another one's."""
    packed = bytearray(pack_fact(encode_fact(fact)))
    at = data.draw(st.integers(0, len(packed) - 1))
    packed[at] ^= 1 << data.draw(st.integers(0, 7))
    try:
        back = decoded(unpack_fact(bytes(packed)))
    except RecordCorrupt:
        return
    if isinstance(fact, CallIntent | CallCompletion):
        assert same_fact(back, fact)


@pytest.mark.parametrize("data", [b"", b"\x93", b"nonsense", msgspec.msgpack.encode(["parcel", [1]])])
def test_other_bytes_are_reported(data: bytes):
    with pytest.raises(RecordCorrupt, match="packed fact"):
        unpack_fact(data)
