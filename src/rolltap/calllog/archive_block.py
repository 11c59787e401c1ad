"""A session's rows in an archive, and the check that they are such as our own writers write, before any of them reaches
a store.

An archive may come from anybody, and some of its rows can never be changed or removed once they are in a store. SQLite
takes a value of any type in any column, and a page that adds up a column fails on a text in one row.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import sqlalchemy as sa

from rolltap.calllog import codec
from rolltap.calllog.notes import check_note_row
from rolltap.calllog.schema import (
    TENANT_IN_TAGS,
    annotations,
    call_completions,
    call_intents,
    column_problem,
    deliveries,
    notes,
    prunings,
    sessions,
)
from rolltap.contract.base import MAX_DEPTH, check_free_form
from rolltap.contract.rules import rules_of
from rolltap.contract.tags import MAX_TAGS, check_sizes
from rolltap.decoding import any_json, from_json, from_msgpack, values_in
from rolltap.errors import InvalidRequest, RecordCorrupt
from rolltap.tenants import DEFAULT_TENANT, TENANT_NAME, tenant_of
from rolltap.token_masks import MASK_ROWS, MASK_TABLE, SAMPLING_MASK
from rolltap.types import ROUTED_EXPERTS

MOST_TAGS = MAX_TAGS + 8
"""Those of a caller, and the server's own."""
TEXT_CHARS = 8192
"""The most characters of a column of text: a harness's name is a tag's value."""
DEEPEST = 2 * MAX_DEPTH
"""Levels of recorded JSON: what the API checks, and the lists and objects around it."""
ID_COLUMNS = {"id", "session_id", "call_id"}
JSON_COLUMNS = {"tags", "log_check", "detail", "value"}
STREAMS = {"logprobs": np.dtype(np.float32), "entropy": np.dtype(np.float32), "clipped": np.dtype(np.int8)}
"""The streams of an annotation, one value for each sampled token."""

ID = re.compile(r"\w[\w.:-]{0,127}")
"""Of a session or a call. It has a place in paths, file names and commands."""
MOST_TOKEN = 1 << 40
"""The greatest fencing token of an annotation: pages add them up."""
MOST_IN_ONE = 1_000_000
"""The most values of a call's request, of its reply and of each text. A body of the API has half as many."""
MOST_CALL_TOKENS = 1 << 24
"""The most tokens of a call's prompt and output. Readers have some 15 bytes for each."""

_CRC_OF_INTENT, _CRC_OF_COMPLETION = 10, 6
_SHARED, _ITEMS_SHARED, _DETAIL, _NEW_IDS = map(
    list(call_intents.c.keys()).index, ("shared", "items_shared", "detail", "new_ids")
)
_OUTPUT_IDS = list(call_completions.c.keys()).index("output_ids")
NO_CANDIDATES = np.empty(0)
_IDS, _TABLE = ("i", (1,)), ("i", (2,))
ARRAYS: Mapping[str, tuple[str, Container[int]]] = {
    "top_ids": _TABLE,
    "top_logprobs": ("f", (2,)),
    SAMPLING_MASK: _TABLE,
    MASK_ROWS: _IDS,
    MASK_TABLE: _IDS,
    ROUTED_EXPERTS: ("i", (2, 3)),
}
"""The optional arrays that readers know: their kind of numbers, of at most 4 bytes, and their dimensions."""


class Block(msgspec.Struct, array_like=True, frozen=True, tag="session"):
    """A session's rows, in the order of their tables' columns. `pruning`: the row about removed calls, if any.

    In files of earlier versions a block ends with `pruning`, and its session with the log check: it is no fork.
    """

    session: list[Any]
    parts: list[tuple[bytes, bytes]]
    intents: list[list[Any]]
    completions: list[list[Any]]
    deliveries: list[list[Any]]
    pruning: list[Any] | None
    notes: list[list[Any]] = []
    annotations: list[list[Any]] = []

    def __post_init__(self) -> None:
        if len(self.session) == len(sessions.columns) - len(codec.NO_ORIGIN):
            self.session.extend(codec.NO_ORIGIN)

    def digest(self) -> bytes:
        """SHA-256 of the block's row ids and checksums: see `calls_digest`."""
        return calls_digest(
            ((row[0], row[_CRC_OF_INTENT]) for row in self.intents),
            ((row[0], row[_CRC_OF_COMPLETION]) for row in self.completions),
            ((row[0], row[1]) for row in self.deliveries),
            ((row[0], row[1]) for row in self.annotations),
        )


def calls_digest(
    intents: Iterable[tuple[str, int]],
    completions: Iterable[tuple[str, int]],
    deliveries: Iterable[tuple[str, bool]],
    annotations: Iterable[tuple[str, int]],
) -> bytes:
    """SHA-256 of the rows that pruning removes: calls by id and row checksum, deliveries, and annotations by call and
    fencing token (an annotation never changes)."""
    tables = (intents, completions, deliveries, annotations)
    lines = [sorted((key, int(value)) for key, value in rows) for rows in tables]
    return hashlib.sha256(msgspec.msgpack.encode(lines)).digest()


def check_block(block: Block, most_bytes: float = math.inf, known_sizes: Mapping[bytes, int] | None = None) -> None:
    """Raises `RecordCorrupt` for rows that the API would refuse, that no writer of ours makes, or that take more than
    `most_bytes` when they are read. `known_sizes`: the unpacked sizes of request parts of the blocks before it."""
    session_id = block.session[0] if block.session else None
    try:
        for table, row in _rows(block):
            _check_row(table, row)
        size, added = _unpacked(block)
        _check_size(size, most_bytes)  # before anything is unpacked
        _check_counts(block)  # before anything is decoded
        sizes = {**(known_sizes or {}), **part_sizes(block)}
        size += _size_of_repeats(block, sizes) + _size_of_arrays(block, added)
        _check_size(size, most_bytes)
        _check_session(block.session)
        for row in block.notes:
            check_note_row(row)
        _check_owners(block)
        _check_annotations(block)
        _check_contents(block)
        _check_values(block)
    except (
        ArithmeticError,
        InvalidRequest,
        LookupError,
        RecordCorrupt,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        raise RecordCorrupt(f"cannot import session {str(session_id)[:256]}: {error}") from error


def _rows(block: Block) -> Iterator[tuple[sa.Table, Sequence[Any]]]:
    yield sessions, block.session
    if block.pruning is not None:
        yield prunings, block.pruning
    for table, rows in (
        (call_intents, block.intents),
        (call_completions, block.completions),
        (deliveries, block.deliveries),
        (notes, block.notes),
        (annotations, block.annotations),
    ):
        yield from ((table, row) for row in rows)


def _check_row(table: sa.Table, row: Sequence[Any]) -> None:
    if len(row) != len(table.columns):
        raise InvalidRequest(f"{table.name}: a row of {len(row)} columns")
    for column, value in zip(table.columns, row, strict=True):
        if problem := _problem(column, value):
            raise InvalidRequest(f"{table.name} {str(row[0])[:80]}: {column.name}: {problem}")


def _problem(column: sa.Column[Any], value: Any) -> str:
    """What is wrong with a value of the column; "" if nothing is."""
    if (problem := column_problem(column, value)) or value is None or not isinstance(column.type, sa.Text):
        return problem
    if column.name in ID_COLUMNS and not ID.fullmatch(value):
        return "not an id"
    return f"over {TEXT_CHARS} characters" if len(value) > TEXT_CHARS and column.name not in JSON_COLUMNS else ""


def part_sizes(block: Block) -> dict[bytes, int]:
    """The unpacked sizes of the block's request parts by hash."""
    return {digest: codec.unpacked_size(data) for digest, data in block.parts}


def _check_size(size: int, most_bytes: float) -> None:
    if size > most_bytes:
        raise InvalidRequest(
            f"{size / 1e6:,.0f} MB when it is unpacked, over {most_bytes / 1e6:g} MB; if the file is from a store of "
            "yours, import it with a larger --session-mb"
        )


def _unpacked(block: Block) -> tuple[int, dict[str, int]]:
    """The bytes of the unpacked rows and of the prompts that they are deltas of; and the tokens that each call adds to
    them. Unpacks nothing.

    The columns of a small file may hold any size. The first prompt that extends another shares its memory; each other
    one copies what it shares (`rebuild_prompts`).
    """
    size = sum(part_sizes(block).values())
    for table, row in _rows(block):
        for column, value in zip(table.columns, row, strict=True):
            if isinstance(value, bytes) and column is not call_intents.c.part_hashes:  # these are not packed
                size += codec.unpacked_size(value)
    outputs = {row[0]: codec.unpacked_size(row[_OUTPUT_IDS]) // 4 for row in block.completions}
    lengths: dict[str, int] = {}
    added: dict[str, int] = {}
    extended: set[str] = set()
    for row in block.intents:
        call_id, parent, shared = row[0], row[codec.INTENT_PARENT], row[_SHARED]
        added[call_id] = codec.unpacked_size(row[_NEW_IDS]) // 4 + outputs.get(call_id, 0)
        lengths[call_id] = shared + added[call_id]
        if lengths[call_id] > MOST_CALL_TOKENS:
            raise InvalidRequest(f"call {call_id}: over {MOST_CALL_TOKENS:,} tokens")
        if parent in extended or shared != lengths.get(parent):
            size += 4 * shared
            added[call_id] += shared
        else:
            extended.add(parent)
    return size, added


def _check_counts(block: Block) -> None:
    """Raises for more values in one piece than the API takes: an empty list has three bytes there, and 60 in memory."""
    for table, row in _rows(block):
        for column, value in zip(table.columns, row, strict=True):
            if column.name in JSON_COLUMNS and isinstance(value, str):
                _check_count(values_in(value.encode()), row[0])
    for call_id, _presumed, *_, message, extras in block.completions:
        _check_count(values_in(codec.unpack_bytes(message)), call_id)
        _check_count(count_values(codec.unpack_bytes(extras), MOST_IN_ONE), call_id)
    values_by_part: dict[bytes, int] = {}
    for digest, data in block.parts:
        text = codec.unpack_bytes(data)
        values_by_part[digest] = values_in(text) if text.lstrip()[:1] in (b"[", b"{") else 0  # an image has any bytes
        _check_count(values_by_part[digest], digest.hex())
    for row in block.intents:
        packed = codec.unpack_bytes(row[-1])
        _check_count(count_values(packed, MOST_IN_ONE), row[0])
        request = from_msgpack(packed, codec.StoredRequest)
        values = sum(map(values_in, (request.head, *request.items, *request.fixed.values())))
        values += sum(values_by_part.get(digest, 0) for digest in codec.split_hashes(row[codec.INTENT_HASHES]))
        _check_count(values, row[0])


def _check_count(values: int, owner: str) -> None:
    if values > MOST_IN_ONE:
        raise InvalidRequest(f"{owner}: over {MOST_IN_ONE:,} values in one piece")


def _size_of_repeats(block: Block, sizes: Mapping[bytes, int]) -> int:
    """The bytes of the parts that a request names again, and of its images, which are copied into its messages."""
    size = 0
    for row in block.intents:
        digests = codec.split_hashes(row[codec.INTENT_HASHES])
        images = len(from_msgpack(codec.unpack_bytes(row[-1]), codec.StoredRequest).image_refs)
        size += sum(codec.base64_size(sizes.get(digest, 0)) for digest in digests[len(digests) - images :])
        size += sum(sizes.get(digest, 0) for digest in digests) - sum(sizes.get(digest, 0) for digest in set(digests))
    return size


def _size_of_arrays(block: Block, added: Mapping[str, int]) -> int:
    """The bytes of the optional arrays, which a trajectory has for the tokens of the prompts, too."""
    size = 0
    for row in block.completions:
        for name, array in codec.unpack_arrays(row[-1]).items():
            if name != MASK_TABLE and array.ndim and len(array):
                size += array.nbytes // len(array) * added.get(row[0], 0)
    return size


def _check_session(row: Sequence[Any]) -> None:
    session = codec.read_session(tuple(row))
    if session.origin is not None and (session.origin.session_id == session.id or (session.origin.at or 0) < 0):
        raise InvalidRequest("it can't be a fork of that")
    pairs = json.loads(row[sessions.c.keys().index("tags")], object_pairs_hook=tuple)
    if len(pairs) != len(session.tags):
        raise InvalidRequest("tags: a name stands there twice")
    check_sizes(session.tags, MOST_TAGS)
    rules_of(session)
    tenant = tenant_of(session.tags)
    if not TENANT_NAME.fullmatch(tenant):
        raise InvalidRequest("tags: no tenant has such a name")
    named = re.search(TENANT_IN_TAGS, row[sessions.c.keys().index("tags")])
    if tenant != (named[1] if named else DEFAULT_TENANT):  # as the database reads it
        raise InvalidRequest("tags: the tenant's tag is not written as a server writes it")


def _check_owners(block: Block) -> None:
    """Raises for a row of another session: an archive adds to its own sessions only."""
    session_id, calls = block.session[0], {row[0] for row in block.intents}
    strays: list[Sequence[Any]] = []
    owned: tuple[tuple[sa.Table, Sequence[Sequence[Any]]], ...] = (
        (call_intents, block.intents),
        (notes, block.notes),
        (annotations, block.annotations),
        (prunings, [block.pruning] if block.pruning is not None else []),
    )
    for table, rows in owned:
        owner = list(table.c.keys()).index("session_id")
        strays += [row for row in rows if row[owner] != session_id]
    strays += [row for row in (*block.completions, *block.deliveries, *block.annotations) if row[0] not in calls]
    if block.pruning is None:  # else its calls are gone, and notes on them stay
        call = list(notes.c.keys()).index("call_id")
        strays += [row for row in block.notes if row[call] is not None and row[call] not in calls]
    if strays:
        raise RecordCorrupt(f"{strays[0][0]} belongs to another session")


def _check_annotations(block: Block) -> None:
    """Raises unless an annotation's streams are those of its call, and its counts such as they can have."""
    tokens = {row[0]: len(codec.read_completion(tuple(row)).output_ids) for row in block.completions}
    for row in block.annotations:
        values: Mapping[str, Any] = dict(zip(annotations.c.keys(), row, strict=True))
        size = tokens.get(row[0])
        streams = codec.unpack_arrays(values["streams"])
        if size is None or any(
            STREAMS.get(name) != each.dtype or each.shape != (size,) for name, each in streams.items()
        ):
            raise InvalidRequest(f"annotations {row[0]}: streams of another call")
        compared, fresh, seen = values["compared"], values["fresh"], values["kept"] + values["clipped"]
        sums = [values[name] for name in ("mismatch_sum", "mismatch_max", "fresh_sum", "kept", "clipped", "fresh")]
        if not 0 <= values["token"] <= MOST_TOKEN:
            raise InvalidRequest(f"annotations {row[0]}: a fencing token that no lease has")
        if min(sums) < 0 or not fresh <= compared <= size or seen > size:
            raise InvalidRequest(f"annotations {row[0]}: counts that {size} tokens can't have")


def _check_contents(block: Block) -> None:
    """Raises for JSON that is nested too deep, and for arrays of a call that are no numbers."""
    for call_id, _presumed, *_, message, extras in block.completions:
        _check_depth(codec.unpack_bytes(message), call_id)
        for name, array in codec.unpack_arrays(extras).items():
            kind, widths = ARRAYS.get(name, ("biuf", range(1, 4)))
            if array.dtype.kind not in kind or array.ndim not in widths or (name in ARRAYS and array.itemsize > 4):
                problem = f"{name} holds no numbers such as engines give: {array.dtype} {array.shape}"
                raise InvalidRequest(f"call {call_id}: {problem}")
    for row in block.intents:
        request = from_msgpack(codec.unpack_bytes(row[-1]), codec.StoredRequest)
        for json_text in (request.head, *request.items, *request.fixed.values()):
            _check_depth(json_text, row[0])
    for digest, data in block.parts:
        _check_depth(codec.unpack_bytes(data), digest.hex())


def _check_values(block: Block) -> None:
    """Raises for numbers of a call that no engine and no writer has: readers would index, decode or add them up."""
    for row in block.intents:
        call_id, detail = row[0], from_json(row[_DETAIL], codec.IntentDetail)
        check_free_form([detail.sampling_asked, detail.sampling_sent], f"call {call_id}: sampling")
        if min(row[_SHARED], row[_ITEMS_SHARED]) < 0 or (detail.break_ is not None and detail.break_[3] < 0):
            raise InvalidRequest(f"call {call_id}: a negative position")
        if codec.unpack_ids(row[_NEW_IDS]).min(initial=0) < 0:
            raise InvalidRequest(f"call {call_id}: a negative token id")
    for row in block.completions:
        done = codec.read_completion(tuple(row))
        if done.output_ids.min(initial=0) < 0:
            raise InvalidRequest(f"call {done.call_id}: a negative token id")
        if done.extras.get("top_ids", NO_CANDIDATES).shape != done.extras.get("top_logprobs", NO_CANDIDATES).shape:
            raise InvalidRequest(f"call {done.call_id}: other candidates than their log-probs")
        for name, array in done.extras.items():
            if name.endswith("_ids") and (array.dtype.kind not in "iu" or array.min(initial=0) < 0):
                raise InvalidRequest(f"call {done.call_id}: {name} are no token ids")


_FIXED = {0xC0: 1, 0xC2: 1, 0xC3: 1, 0xCA: 5, 0xCB: 9, 0xCC: 2, 0xCD: 3, 0xCE: 5, 0xCF: 9, 0xD0: 2, 0xD1: 3, 0xD2: 5}
_FIXED |= {0xD3: 9, 0xD4: 3, 0xD5: 4, 0xD6: 6, 0xD7: 10, 0xD8: 18, 0xDC: 3, 0xDD: 5, 0xDE: 3, 0xDF: 5}
"""The bytes of a value, or of the head of a list or map, by its first byte."""
_MEASURED = {0xC4: (1, 0), 0xC5: (2, 0), 0xC6: (4, 0), 0xC7: (1, 1), 0xC8: (2, 1), 0xC9: (4, 1)}
_MEASURED |= {0xD9: (1, 0), 0xDA: (2, 0), 0xDB: (4, 0)}
"""The bytes of a length, and those between it and so many bytes."""


def count_values(data: bytes, most: int) -> int:
    """The number of values in `data`, lists and maps and what is in them; stops above `most`. It means nothing if
    `data` is no MessagePack. It makes none of them: an empty list takes one byte there, and 56 in memory."""
    at = count = 0
    while at < len(data) and count <= most:
        first = data[at]
        count += 1
        if first < 0xA0 or first >= 0xE0:
            at += 1
        elif first < 0xC0:
            at += 1 + (first & 0x1F)
        elif first in _MEASURED:
            width, between = _MEASURED[first]
            at += 1 + width + between + int.from_bytes(data[at + 1 : at + 1 + width])
        else:
            at += _FIXED.get(first, 1)
    return count


def missing_parts(block: Block, known: Container[bytes]) -> list[str]:
    """The request parts that the block refers to and that neither it nor `known`, the blocks before it, has."""
    own = {digest for digest, _ in block.parts}
    digests = {digest for row in block.intents for digest in codec.split_hashes(row[codec.INTENT_HASHES])}
    return sorted(digest.hex() for digest in digests if digest not in own and digest not in known)


def _check_depth(text: bytes, owner: str) -> None:
    if text.count(b"[") + text.count(b"{") <= DEEPEST:
        return
    try:
        level = [any_json(text)]
    except msgspec.MsgspecError as error:
        if isinstance(error.__context__, RecursionError):
            raise InvalidRequest(f"{owner}: nested deeper than {DEEPEST} levels") from None
        return  # an image is a part, too
    for _ in range(DEEPEST):
        lists = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        level = [inner for each in lists for inner in each]
    if level:
        raise InvalidRequest(f"{owner}: nested deeper than {DEEPEST} levels")
