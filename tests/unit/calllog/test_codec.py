"""What is packed comes back bit for bit, and damage is reported, never returned."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rolltap.calllog.codec import (
    pack_arrays,
    pack_bytes,
    pack_floats,
    pack_ids,
    unpack_arrays,
    unpack_bytes,
    unpack_floats,
    unpack_ids,
)
from rolltap.errors import RecordCorrupt

ids = hnp.arrays(np.int32, st.integers(0, 300))
floats = hnp.arrays(np.float32, st.integers(0, 300), elements=st.floats(width=32))
kinds = st.sampled_from(["<i2", "<i8", "<f4", ">f8", "|u1", "|b1"])


@given(st.binary(max_size=2000) | st.binary(max_size=40).map(lambda part: part * 50))
def test_bytes_come_back(data: bytes):
    assert unpack_bytes(pack_bytes(data)) == data


@given(ids)
def test_ids_come_back(array: np.ndarray):
    back = unpack_ids(pack_ids(array))
    assert back.dtype == np.int32
    assert back.tobytes() == array.tobytes()


@given(floats)
def test_floats_come_back_with_their_nans(array: np.ndarray):
    back = unpack_floats(pack_floats(array))
    assert back.dtype == np.float32
    assert back.tobytes() == array.tobytes()


@given(st.dictionaries(st.text(), hnp.arrays(kinds, hnp.array_shapes(min_dims=1, max_dims=3, min_side=0)), max_size=3))
def test_named_arrays_come_back(arrays: dict[str, np.ndarray]):
    back = unpack_arrays(pack_arrays(arrays))
    assert back.keys() == arrays.keys()
    for name, array in arrays.items():
        assert back[name].shape == array.shape
        assert back[name].astype(array.dtype).tobytes() == array.tobytes()


@given(ids)
def test_arrays_that_are_not_contiguous_are_packed_like_their_copies(array: np.ndarray):
    assert pack_ids(array[::2]) == pack_ids(array[::2].copy())


def test_token_ids_take_less_than_half_of_their_bytes():
    array = np.random.default_rng(0).zipf(1.3, 8000).clip(0, 150_000).astype(np.int32)
    assert len(pack_ids(array)) < array.nbytes / 2


@given(st.binary(min_size=1, max_size=200))
def test_no_bytes_make_the_decoders_fail_in_another_way(data: bytes):
    for unpack in (unpack_bytes, unpack_ids, unpack_floats, unpack_arrays):
        with suppress(RecordCorrupt):
            unpack(data)


def test_a_damaged_value_is_reported():
    packed = pack_ids(np.arange(1000, dtype=np.int32))
    with pytest.raises(RecordCorrupt):
        unpack_ids(packed[:-5])
    with pytest.raises(RecordCorrupt, match="mark 9"):
        unpack_bytes(b"\x09abc")
    with pytest.raises(RecordCorrupt):
        unpack_ids(b"\x00abc")


def test_what_is_unpacked_can_not_be_changed():
    for size in (3, 300):
        with pytest.raises(ValueError, match="read-only"):
            unpack_ids(pack_ids(np.arange(size, dtype=np.int32)))[0] = 7
