"""History items that come again: the cache of what was parsed, and of long lists."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from operator import is_

import pytest

from rolltap.errors import InvalidRequest
from rolltap.protocols.base import WireRequest
from rolltap.protocols.cache_space import ENTRY_BYTES, CacheSpace
from rolltap.protocols.request_cache import LONG, ItemCache
from tests.dialects import DIALECTS


def test_the_cache_keeps_the_latest_bytes_within_its_limit() -> None:
    parsed: list[bytes] = []
    space = CacheSpace(8 * (ENTRY_BYTES + 20))
    cache = ItemCache(lambda raw: parsed.append(raw) or raw.upper(), space)
    raws = [bytes([letter]) * 10 for letter in b"abcdefgh"]
    for raw in raws:
        cache.get(raw)
    cache.get(raws[0])
    cache.get(b"z" * 10)
    assert len(parsed) == 9
    cache.get(raws[0])
    cache.get(raws[1])
    assert parsed[9:] == [raws[1]]
    assert len(cache) == 8


def test_the_cache_gives_back_the_first_copy() -> None:
    cache = ItemCache(lambda raw: object(), CacheSpace())
    first, value = cache.get(bytes(bytearray(b"item")))
    again, same = cache.get(bytes(bytearray(b"item")))
    assert first is again
    assert value is same


def test_an_item_too_large_to_keep_is_only_parsed() -> None:
    cache = ItemCache(len, CacheSpace(8 * (ENTRY_BYTES + 20)))
    assert cache.get(b"x" * 11)[1] == 11
    assert len(cache) == 0


def test_a_refusal_is_not_kept_and_names_its_item() -> None:
    def parse(raw: bytes) -> None:
        raise InvalidRequest("text: no", param="text")

    cache = ItemCache(parse, CacheSpace())
    for _ in range(2):
        with pytest.raises(InvalidRequest) as raised:
            cache.all(b"[{}, 7]", "messages")
        assert raised.value.param == "messages[0].text"
        assert raised.value.message == "messages[0].text: no"


def listed(*items: object, space: str = "") -> bytes:
    return f"{space},{space}".join(json.dumps(item) for item in items).join(("[", f"{space}]")).encode()


@pytest.mark.parametrize("space", ["", " ", "\n\t"])
def test_a_list_that_goes_on_is_read_from_there_on(space: str) -> None:
    parsed: list[bytes] = []
    cache = ItemCache(lambda raw: parsed.append(raw) or [raw], CacheSpace(8 * LONG * 200))
    history = [{"at": at, "text": "some text or other"} for at in range(LONG)]
    items, values = cache.all(listed(*history, space=space), "messages")
    assert len(parsed) == LONG
    for new in ([], [7], [8, "nine"], [70]):
        parsed.clear()
        again, same = cache.all(listed(*history, *new, space=space), "messages")
        assert parsed == [json.dumps(value).encode() for value in new]
        assert again == items + tuple(parsed)
        assert all(map(is_, again, items))
        assert all(map(is_, same, values))
        items, values = again, same
        history += new


@pytest.mark.parametrize("change", [lambda text: text[:-1] + b"0]", lambda text: b" " + text, lambda text: text[:-1]])
def test_a_list_that_only_looks_like_a_former_one_is_read_by_itself(change: Callable[[bytes], bytes]) -> None:
    cache = ItemCache(lambda raw: raw, CacheSpace())
    former = listed(*range(LONG), 12)
    cache.all(former, "messages")
    changed = change(former)
    try:
        expected = json.loads(changed)
    except ValueError:
        with pytest.raises(InvalidRequest):
            cache.all(changed, "messages")
    else:
        assert [json.loads(item) for item in cache.all(changed, "messages")[0]] == expected


def test_the_item_that_is_refused_is_named_by_its_place_in_the_whole_list() -> None:
    def parse(raw: bytes) -> bytes:
        if raw == b"null":
            raise InvalidRequest("no")
        return raw

    cache = ItemCache(parse, CacheSpace())
    cache.all(listed(*range(LONG)), "messages")
    with pytest.raises(InvalidRequest) as raised:
        cache.all(listed(*range(LONG), 1, None), "messages")
    assert raised.value.param == f"messages[{LONG + 1}]"


def test_of_long_lists_a_bounded_number_of_bytes_is_remembered() -> None:
    space = CacheSpace(64_000_000)
    cache = ItemCache(lambda raw: raw, space)
    for number in range(30):
        cache.all(listed(number, *("x" * 40_000 for _ in range(LONG))), "messages")
    count = len(cache._lists)
    assert 1 < count < 30
    cache.all(listed("x" * space.limit, *range(LONG)), "messages")
    assert len(cache._lists) == count
    assert space.size <= space.limit


@pytest.mark.parametrize("end", [b",]", b",,7]", b" 7]"])
def test_what_follows_a_former_list_must_be_json(end: bytes) -> None:
    dialect = DIALECTS["openai_chat"]
    history = listed(*({"role": "user", "content": str(at)} for at in range(LONG)))
    body = b'{"model": "m", "messages": %b}'
    request = WireRequest("/v1/chat/completions", {}, {}, {}, body % history)
    assert len(dialect.parse(request).messages) == LONG
    with pytest.raises(InvalidRequest):
        dialect.parse(replace(request, body=body % (history[:-1] + end)))
