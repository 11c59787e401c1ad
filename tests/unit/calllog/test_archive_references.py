"""A small archive takes no more than it may when it is read, whatever its rows refer to and how often."""

from __future__ import annotations

import base64
import os
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltap.calllog import codec
from rolltap.calllog.archive import ArchiveWriter, import_sessions
from rolltap.calllog.archive_block import Block, check_block
from rolltap.calllog.codec import (
    StoredRequest,
    checksum,
    completion_row,
    intent_row,
    join_request,
    pack_bytes,
    part_hash,
    session_row,
    split_request,
)
from rolltap.calllog.facts import RequestParts
from rolltap.calllog.notes import append_note, tags_after
from rolltap.calllog.sql import SqlCallLog
from rolltap.contract.admin import NewNote, Note
from rolltap.contract.tags import SET_BY_SERVER
from rolltap.datasets.record import ReadOptions, recorded_groups
from rolltap.errors import InvalidRequest, RecordCorrupt
from rolltap.reconstructor.exporters.dataset import Grouping
from rolltap.reconstructor.rules import session_rules
from rolltap.types import Session

from .facts import a_completion, a_session, an_intent, append

PART = os.urandom(100_000)
TEXT = b'{"role":"user","content":""}'


def block_of(session: Session, request: StoredRequest, digests: Sequence[bytes], parts: Sequence[bytes]) -> Block:
    """A call whose request is as it is given."""
    intent, *_ = intent_row(an_intent(session))
    done = a_completion(intent[0])
    body = (intent[11], b"".join(digests), *intent[13:15], pack_bytes(msgspec.msgpack.encode(request)))
    row = [*intent[:10], checksum(intent[:10], body), *body]
    large = [(part_hash(part), pack_bytes(part)) for part in parts]
    return Block(list(session_row(session)), large, [row], [list(completion_row(done))], [], None)


REFERENCES = {
    "images": lambda n: StoredRequest(b"{}", [TEXT], [], {}, [], [(0, 27)] * n),
    "images beside it": lambda n: StoredRequest(b"{}", [], [], {}, [], [(-1, 0)] * n),
    "items": lambda n: StoredRequest(b"{}", [b""] * n, list(range(n)), {}, []),
    "fields": lambda n: StoredRequest(b"{}", [], [], {str(k): b"" for k in range(n)}, [str(k) for k in range(n)]),
}


@pytest.mark.parametrize("part_in", ["the same session", "the one before"])
@pytest.mark.parametrize("what", REFERENCES)
async def test_a_part_counts_as_often_as_a_request_names_it(
    sql_log: SqlCallLog, tmp_path: Path, what: str, part_in: str
) -> None:
    """A file of 100 kB would take 100 MB in each reader."""
    digest, first = part_hash(PART), a_session()
    many = block_of(
        a_session(), REFERENCES[what](1000), [digest] * 1000, [PART] if part_in == "the same session" else []
    )
    with ArchiveWriter(tmp_path / "a.rtlog") as archive:
        if part_in == "the one before":
            archive.add(block_of(first, StoredRequest(b"{}", [b""], [0], {}, []), [digest], [PART]))
        archive.add(many)
    assert (tmp_path / "a.rtlog").stat().st_size < 200_000
    with pytest.raises(RecordCorrupt, match="MB when it is unpacked, over 50 MB"):
        await import_sessions(sql_log.database, tmp_path / "a.rtlog", session_mb=50)
    assert (await import_sessions(sql_log.database, tmp_path / "a.rtlog", session_mb=300)).new


@pytest.mark.parametrize("what", REFERENCES)
def test_a_reader_makes_no_larger_request_than_one_may_be(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be in a store already."""
    monkeypatch.setattr(codec, "MOST_REQUEST_BYTES", 50_000_000)
    with pytest.raises(ValueError, match="it has over 50,000,000 bytes"):
        join_request(REFERENCES[what](1000), 0, [PART] * 1000)


@pytest.mark.parametrize("order", ["forward", "backward", "one place"])
def test_images_are_joined_in_time(order: str) -> None:
    """Each image that is inserted alone copies all of the message."""
    places = {"forward": range(3000), "backward": range(3000, 0, -1), "one place": [5] * 3000}[order]
    request = StoredRequest(b"{}", [b"a" * 1_000_000], [], {}, [], [(0, at) for at in places])
    began = time.process_time()
    with pytest.raises(ValueError, match="over") if order == "backward" else nullcontext():
        join_request(request, 0, [b"image" * 200] * 3000)
    assert time.process_time() - began < 2


@given(st.lists(st.lists(st.binary(min_size=1, max_size=40), max_size=6), max_size=3), st.randoms())
def test_images_come_back_where_they_were(of_items: list[list[bytes]], random) -> None:
    """Also where a message quotes an image before it, so that the later one is cut first."""
    images = [image for some in of_items for image in some]
    items = tuple(b"-".join([b"text", *map(base64.b64encode, some), b"end"]) for some in of_items)
    random.shuffle(images)
    request = RequestParts(b"{}", items, 0, {}, tuple(images))
    stored, parts = split_request(request)
    assert join_request(stored, 0, parts) == request


@pytest.mark.parametrize("at", [-1, 29, 2**62])
def test_an_image_has_a_place_in_its_message(at: int) -> None:
    with pytest.raises(ValueError, match="no place of its item"):
        join_request(StoredRequest(b"{}", [TEXT], [], {}, [], [(0, at)]), 0, [PART])


KNOWN = ("top_ids", "top_logprobs", "sampling_mask", "mask_rows", "mask_table", "routed_experts")
ODD_ARRAYS = {
    "unsigned": np.zeros((2, 3), np.uint64),
    "wide": np.full((2, 3), 2**40),
    "doubles": np.full((2, 3), 1e300),
    "four dimensions": np.zeros((2, 1, 1, 1), np.int32),
    "flags": np.zeros((2, 3), np.bool_),
}


@pytest.mark.parametrize("odd", ODD_ARRAYS)
@pytest.mark.parametrize("name", KNOWN)
def test_an_array_that_readers_know_is_such_as_engines_give(name: str, odd: str) -> None:
    session = a_session()
    intent = an_intent(session)
    done = a_completion(intent.id, extras={name: ODD_ARRAYS[odd]})
    rows = [list(intent_row(intent)[0])], [list(completion_row(done))]
    with pytest.raises(RecordCorrupt, match=f"{name} holds no numbers such as engines give"):
        check_block(Block(list(session_row(session)), [], *rows, [], None))


def test_an_array_counts_for_the_tokens_of_the_prompt_too() -> None:
    """A trajectory has a row for each of them."""
    session = a_session()
    intent = an_intent(session, new_ids=np.zeros(10_000, np.int32))
    done = a_completion(intent.id, extras={"routed_experts": np.zeros((2, 10_000), np.int8)})
    block = Block(list(session_row(session)), [], [list(intent_row(intent)[0])], [list(completion_row(done))], [], None)
    with pytest.raises(RecordCorrupt, match="100 MB when it is unpacked"):
        check_block(block, 50e6)
    check_block(block, 150e6)


@pytest.mark.parametrize("odd", ODD_ARRAYS)
async def test_a_dataset_has_the_other_sessions_when_one_can_not_be_read(sql_log: SqlCallLog, odd: str) -> None:
    """It may be in a store already."""
    good, bad = (a_session(rollout_id=None, tags={}) for _ in range(2))
    for session in (bad, good):
        await sql_log.open_session(session)
        intent = await append(sql_log, session) if session is good else an_intent(session)
        if session is bad:
            await sql_log.append_intent(intent)
            done = a_completion(intent.id, extras={"routed_experts": ODD_ARRAYS[odd], "top_ids": ODD_ARRAYS[odd]})
            await sql_log.append_completion(replace(done, logprobs=np.zeros(2, np.float32)))
    failed: list[str] = []
    options = ReadOptions("tree", session_rules, lambda session: (), Grouping())
    groups = [items async for items in recorded_groups(sql_log, options, lambda id, error: failed.append(id))]
    read = [item.session.id for items in groups for item in items]
    assert good.id in read
    assert {*read, *failed} == {good.id, bad.id}


@pytest.mark.parametrize("name", SET_BY_SERVER)
async def test_no_note_changes_a_tag_that_the_server_sets(sql_log: SqlCallLog, name: str) -> None:
    """Of the session's tags the rules decide what is trained, and the tenant who may read it."""
    session = a_session(tags={name: "as it was"})
    await sql_log.open_session(session)
    with pytest.raises(InvalidRequest, match="the server sets the tag"):
        await append_note(sql_log.database, NewNote("tag", name, "other", session_id=session.id))
    row = ["n1", session.id, None, "tag", name, '"other"', "me", 5.0]
    with pytest.raises(RecordCorrupt, match="the server sets the tag"):
        check_block(Block(list(session_row(replace(session, tags={}))), [], [], [], [], None, [row]))
    for value in ("other", None):
        note = Note("n1", session.id, None, "tag", name, value, author="me", created_at=5.0)
        assert tags_after(session.tags, [note]) == {name: "as it was"}


EMPTY = b"[" + b"[]," * 1_500_000 + b"[]]"
COUNTED = {
    "item": ({"request": RequestParts(b"{}", (EMPTY,))}, {}),
    "head": ({"request": RequestParts(EMPTY)}, {}),
    "field": ({"request": RequestParts(b"{}", (), 0, {"tools": EMPTY})}, {}),
    "four items": ({"request": RequestParts(b"{}", (EMPTY[: len(EMPTY) // 4],) * 4)}, {}),
    "small items": ({"request": RequestParts(b"{}", (b"[]",) * 1_500_000)}, {}),
    "sampling": ({"sampling_asked": {"x": [[]] * 1_500_000}}, {}),
    "message": ({}, {"message": EMPTY}),
    "usage": ({}, {"usage": {str(at): 1 for at in range(600_000)}}),
    "arrays": ({}, {"extras": {str(at): np.zeros(2, np.int8) for at in range(200_000)}}),
}


@pytest.mark.parametrize("what", COUNTED)
def test_a_piece_of_an_archive_has_a_most_number_of_values(what: str) -> None:
    """30 MB of empty lists are 500 bytes in a file, and took a GB and a minute of each reader."""
    of_call, of_reply = COUNTED[what]
    session = a_session()
    intent = an_intent(session, **of_call)
    row, large = intent_row(intent)
    parts = [(digest, pack_bytes(part)) for digest, part in large.items()]
    done = completion_row(a_completion(intent.id, **of_reply))
    block = Block(list(session_row(session)), parts, [list(row)], [list(done)], [], None)
    began = time.process_time()
    with pytest.raises(RecordCorrupt, match="over 1,000,000 values in one piece"):
        check_block(block)
    assert time.process_time() - began < 5


def test_an_image_of_an_archive_may_have_any_bytes() -> None:
    session = a_session()
    image = b"\x89PNG" + b"[{,:" * 1_000_000
    digest = part_hash(image)
    check_block(block_of(session, StoredRequest(b"{}", [TEXT], [], {}, [], [(0, 27)]), [digest], [image]))
