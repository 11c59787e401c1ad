"""Prompts as JSON, made of those that they continue, and told from what an engine says it saw."""

from __future__ import annotations

import json
import weakref

import msgspec
import numpy as np
import pytest

from rolltap.errors import EngineProtocolError
from rolltap.protocols.cache_space import CacheSpace
from rolltap.proxy.engines.prompts import NOT_ECHOED, Prompts, echoed_ids, written


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


@pytest.mark.parametrize("first", [ids(), ids(5, 151_642), ids(5, 7)])
@pytest.mark.parametrize("second", [ids(), ids(5, 7), ids(5, 7, 0), ids(5, 151_642, 3), ids(5)])
def test_a_prompt_is_written_as_its_own_ids_whatever_it_continues(first: np.ndarray, second: np.ndarray) -> None:
    prompts = Prompts()
    prompts.make("one", first)
    prompt = prompts.make("two", second, "one")
    assert json.loads(msgspec.json.encode({"prompt": prompt}, enc_hook=written))["prompt"] == second.tolist()
    assert list(prompt) == second.tolist()
    assert [prompt[at] for at in range(len(prompt))] == prompt[:] == second.tolist()


def test_only_what_is_new_is_written_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    anew: list[int] = []
    encode = msgspec.json.encode
    monkeypatch.setattr(msgspec.json, "encode", lambda value: anew.append(len(value)) or encode(value))
    prompts = Prompts()
    whole = np.arange(1000, dtype=np.int32)
    prompts.make("one", whole[:900])
    prompts.make("two", whole, "one")
    prompts.make("three", whole, "two")
    prompts.make("four", whole, "one")  # whose place the second has taken
    assert anew == [900, 100, 1000]


def test_prompts_are_kept_within_a_limit_of_bytes() -> None:
    space = CacheSpace(16_000)
    prompts = Prompts(space)
    parent = None
    for number in range(100):
        prompts.make(f"call {number}", np.arange(number, dtype=np.int32), parent)
        prompts.make(f"other {number}", np.arange(50, dtype=np.int32))
        assert 0 < prompts.kept.size == space.size <= space.limit
        parent = f"call {number}"
    count = len(prompts.kept)
    assert prompts.make("too large", np.arange(1000, dtype=np.int32))[:] == list(range(1000))
    assert len(prompts.kept) == count


def test_the_prompts_of_a_session_that_has_ended_are_dropped() -> None:
    space = CacheSpace(16_000)
    prompts = Prompts(space)
    prompts.make("one", ids(5, 7))
    prompts.make("two", ids(5, 7, 9), "one")
    prompts.make("other", ids(5, 7))
    prompts.release(["one", "two"])
    assert len(prompts.kept) == 1
    prompts.release(["other", "unknown"])
    assert space.size == 0


def test_equal_first_prompts_are_one_object_until_all_their_sessions_have_ended() -> None:
    prompts = Prompts()
    first, second = prompts.make("one", ids(5, 7)), prompts.make("two", ids(5, 7))
    assert second is first
    assert prompts.make("three", ids(5, 7, 9), "two") is not first
    prompts.release(["one"])
    assert list(first) == [5, 7]
    gone = weakref.ref(first)
    del first, second
    assert gone() is None


def test_what_has_no_ids_is_not_kept() -> None:
    prompts = Prompts()
    assert list(prompts.make("of an upstream that renders by itself", ids())) == []
    assert len(prompts.kept) == 0


@pytest.mark.parametrize("told", [b'"1,2"', b"[1.5]", b"{}"])
def test_what_is_no_list_of_ids_breaks_the_protocol(told: bytes) -> None:
    with pytest.raises(EngineProtocolError):
        echoed_ids(msgspec.Raw(told), Prompts().make("one", ids(1, 2)))


def test_what_an_engine_says_is_read_unless_it_is_what_was_sent() -> None:
    sent = Prompts().make("one", ids(1, 2, 3))
    assert echoed_ids(msgspec.Raw(b"[1,2,3]"), sent) is sent
    assert echoed_ids(msgspec.Raw(b"[1, 2, 3]"), sent) == [1, 2, 3]
    assert echoed_ids(msgspec.Raw(b"[1,2]"), sent) == [1, 2]
    assert echoed_ids(NOT_ECHOED, sent) is None
