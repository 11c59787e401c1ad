"""Handles name calls, can't be forged, and fit where clients put them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltap.ids import new_id
from rolltap.protocols.handles import MAX_POSITION, Handles

HANDLES = Handles(b"a secret of the installation")


@given(st.integers(0, MAX_POSITION))
def test_a_handle_names_its_call(position: int) -> None:
    call_id = new_id()
    handle = HANDLES.mint(call_id, position)
    assert len(handle) <= 40
    assert HANDLES.read(handle) == call_id
    assert HANDLES.read("rs_" + handle) == call_id


def test_a_foreign_handle_is_ignored_and_counted() -> None:
    ours, theirs = Handles(b"one secret, sixteen"), Handles(b"another one, sixteen")
    assert ours.read(theirs.mint(new_id())) is None
    assert ours.forged == 1
    assert ours.read("call_abc123") is None
    assert ours.read(None) is None
    assert ours.forged == 1


@given(st.integers(5, 38), st.sampled_from("0123456789abcdefghjkmnpqrstvwxyz"))
def test_a_changed_handle_is_refused(at: int, letter: str) -> None:
    handle = HANDLES.mint(new_id(), 3)
    changed = handle[:at] + letter + handle[at + 1 :]
    assert changed == handle or HANDLES.read(changed) is None


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        Handles(b"short")
