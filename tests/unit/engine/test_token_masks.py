"""Sampling masks of any size: every set comes back, and their tables stay small."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from rolltap.calllog.codec import pack_arrays, unpack_arrays
from rolltap.proxy.call.open_call import SampledTokens
from rolltap.proxy.engines.base import SampleChunk, join_chunks
from rolltap.token_masks import FREE, LONGEST_TABLE, MaskWriter, ids_of, joined

VOCABULARY = 151_936


def words_of(ids: np.ndarray, vocabulary: int) -> np.ndarray:
    bits = np.zeros(-(-vocabulary // 32) * 32, np.uint8)
    bits[ids] = 1
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)


sets = st.lists(st.integers(0, 999), min_size=1, max_size=999, unique=True)


@given(st.lists(st.lists(st.one_of(st.none(), sets), max_size=8), max_size=4))
def test_every_set_comes_back(calls: list[list[list[int] | None]]) -> None:
    parts = []
    for call in calls:
        writer, pieces, rows = MaskWriter(), [], []
        for ids in call:
            rows.append(FREE if ids is None else writer.add(words_of(np.array(ids), 1000)))
            pieces.append(writer.take())
        parts.append((np.array(rows, np.int32), np.concatenate([np.empty(0, np.int32), *pieces])))
    rows, table = joined(parts)
    read = [ids_of(row, table) for row in rows.tolist()]
    wanted = [ids for call in calls for ids in call]
    assert [None if ids is None else ids.tolist() for ids in read] == [ids and sorted(ids) for ids in wanted]
    assert joined([*parts, *parts])[1].tolist() == table.tolist()


def test_a_forced_token_needs_no_table() -> None:
    writer = MaskWriter()
    assert writer.add(words_of(np.array([VOCABULARY - 1]), VOCABULARY)) == -2 - (VOCABULARY - 1)
    assert not len(writer.take())


def test_a_reply_of_large_sets_is_stored_compactly() -> None:
    """2,000 tokens of JSON, each drawn from up to 150,000 ids: as lists of ids that would be 1.2 GB."""
    rng, writer = np.random.default_rng(0), MaskWriter()
    inside = np.flatnonzero(rng.random(VOCABULARY) < 0.95)
    kinds = [inside, *(inside[rng.random(len(inside)) < 0.99] for _ in range(20)), np.arange(10), np.array([5])]
    rows = np.array([writer.add(words_of(kinds[at], VOCABULARY)) for at in rng.integers(0, len(kinds), 2000)], np.int32)
    stored = {"mask_rows": rows, "mask_table": writer.take()}
    packed = pack_arrays(stored)
    assert not writer.full
    assert sum(array.nbytes for array in stored.values()) < 420_000
    assert len(packed) < 420_000
    assert unpack_arrays(packed)["mask_table"].tolist() == stored["mask_table"].tolist()


def test_a_table_has_a_limit() -> None:
    rng, writer, added = np.random.default_rng(0), MaskWriter(), 0
    while not writer.full:
        writer.add(words_of(np.flatnonzero(rng.random(VOCABULARY) < 0.5), VOCABULARY))
        added += 1
    assert 200 < added < 240
    assert len(writer.take()) < LONGEST_TABLE + 5000


@pytest.mark.parametrize("row", [0, 3, 10**6])
def test_a_set_that_is_not_there_is_an_error(row: int) -> None:
    with pytest.raises((IndexError, ValueError)):
        ids_of(row, np.array([0, 5, 1, 9], np.int32))


def test_sampled_tokens_keep_whole_tables() -> None:
    """A stop string or a fork cuts the rows; a chunk without rows leaves no masks at all."""
    table = np.array([2, 4, 7, 2, 5, 9], np.int32)
    first = SampleChunk(token_ids=[4, 5], logprobs=[0.0, 0.0], extras={"mask_rows": np.array([0, 3], np.int32)})
    last = SampleChunk(token_ids=[7], logprobs=[0.0], extras={"mask_rows": np.array([0], np.int32)})
    sampled = SampledTokens()
    for chunk, words, end in ((first, table, 2), (last, table[:0], 3)):
        sampled.take(replace(chunk, mask_table=words), end)
    assert {name: array.tolist() for name, array in sampled.aligned().items()} == {
        "mask_rows": [0, 3, 0],
        "mask_table": table.tolist(),
    }
    together = join_chunks([replace(first, mask_table=table), replace(last, mask_table=table[:0])])
    assert together.mask_table is not None
    assert (together.extras["mask_rows"].tolist(), together.mask_table.tolist()) == ([0, 3, 0], table.tolist())
    sampled.truncate(2)
    assert sampled.aligned()["mask_rows"].tolist() == [0, 3]
    assert sampled.aligned()["mask_table"].tolist() == table.tolist()
    sampled.take(SampleChunk(token_ids=[9], logprobs=[0.0]), 3)
    assert sampled.aligned() == {}
