"""A request that extends a known one is read, or refused, as by a dialect that knows nothing."""

from __future__ import annotations

import pytest

from rolltap.errors import InvalidRequest
from rolltap.proxy.conversation.chat import ChatRequest
from rolltap.proxy.dialects.base import WireRequest
from rolltap.proxy.dialects.openai_chat import OpenAIChat

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
    knowing = OpenAIChat()
    parsed(knowing, FIRST)
    assert parsed(knowing, body) == parsed(OpenAIChat(), body)
    assert parsed(knowing, body) == parsed(OpenAIChat(), body)
