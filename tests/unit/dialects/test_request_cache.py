"""A request that extends a known one is read, or refused, as by a dialect that knows nothing."""

from __future__ import annotations

import pytest

from rolltap.errors import InvalidRequest
from rolltap.protocols.base import WireRequest
from rolltap.protocols.cache_space import CacheSpace
from rolltap.protocols.conversation import ChatRequest
from rolltap.protocols.history import LinkedHistory
from rolltap.protocols.openai_chat.dialect import OpenAIChat
from rolltap.protocols.request_cache import KnownRequest, RequestCache

FIRST = b'{"model": "m", "messages": [{"role": "user", "content": "hi"}], "metadata": [1], "n": 1}'
OPEN = FIRST[: FIRST.index(b"]")]
CLOSE = FIRST[FIRST.index(b"]") :]
MORE = b'{"role": "assistant", "content": "ho"}'

SECOND = {
    "the same": OPEN + CLOSE,
    "one more": OPEN + b", " + MORE + CLOSE,
    "two more": OPEN + b"," + MORE + b" ,\n" + MORE + b" " + CLOSE,
    "a comma alone": OPEN + b"," + CLOSE,
    "two commas": OPEN + b",," + MORE + CLOSE,
    "no comma": OPEN + MORE + CLOSE,
    "another list": OPEN + b'], "stop": ["x"' + CLOSE,
    "a second history": OPEN + b'], "messages": [' + MORE + CLOSE,
    "cut off": OPEN + b", " + MORE,
    "a bad message": OPEN + b', {"role": "wizard"}' + CLOSE,
    "no UTF-8": OPEN + b', {"role": "user", "content": "hi", "x\xf0": 1}' + CLOSE,
    "an orphan": OPEN + b', {"role": "tool", "tool_call_id": "c", "content": ""}' + CLOSE,
    "another rest": OPEN + b", " + MORE + CLOSE.replace(b"1}", b"2}"),
}


def parsed(dialect: OpenAIChat, body: bytes) -> ChatRequest | str:
    try:
        return dialect.parse(WireRequest("", {}, {}, {"authorization": "Bearer key"}, body))
    except InvalidRequest as error:
        return error.message


@pytest.mark.parametrize("body", SECOND.values(), ids=SECOND.keys())
def test_what_is_known_changes_nothing(body: bytes) -> None:
    knowing = OpenAIChat(CacheSpace())
    parsed(knowing, FIRST)
    assert parsed(knowing, body) == parsed(OpenAIChat(CacheSpace()), body)
    assert parsed(knowing, body) == parsed(OpenAIChat(CacheSpace()), body)


def test_the_requests_of_a_released_key_are_dropped() -> None:
    space = CacheSpace()
    cache = RequestCache("messages", space)
    chat = OpenAIChat(CacheSpace()).parse(WireRequest("", {}, {}, {}, FIRST))
    for key in ("one", "other"):
        cache.keep(key, KnownRequest(chat, LinkedHistory(), FIRST, FIRST[FIRST.index(b"[") : -len(CLOSE) + 1]), None)
    size = space.size
    cache.release(hash("one"))
    cache.release(hash("unknown"))
    assert space.size == size // 2
    assert cache.extended("one", FIRST) is None
    assert cache.extended("other", FIRST) is not None
