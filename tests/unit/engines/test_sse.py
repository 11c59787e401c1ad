"""Server-sent events, whatever their cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltap.errors import EngineProtocolError
from rolltap.proxy.engines.http import SseParser

PAYLOADS = st.lists(st.binary(max_size=30).map(lambda data: data.replace(b"\n", b"").replace(b"\r", b"")), max_size=8)


def parse(stream: bytes, cuts: list[int]) -> list[bytes]:
    parser = SseParser()
    edges = sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in cuts)})
    return [event for start, end in pairwise(edges) for event in parser.feed(stream[start:end])]


@given(PAYLOADS, st.lists(st.integers(0, 10_000), max_size=40), st.sampled_from([b"\n", b"\r\n"]))
def test_events_do_not_depend_on_how_the_bytes_are_cut(payloads: list[bytes], cuts: list[int], newline: bytes):
    stream = b"".join(b"data: " + payload + newline * 2 for payload in payloads)
    assert parse(stream, cuts) == payloads


def test_every_single_cut():
    stream = (
        'data: {"text": "zwölf 🙂"}\r\n\r\n: comment\n\ndata:x\ndata: y\nid: 3\n\ndata\n\ndata: [DONE]\n\n'.encode()
    )
    whole = parse(stream, [])
    assert whole == ['{"text": "zwölf 🙂"}'.encode(), b"x\ny", b"", b"[DONE]"]
    assert all(parse(stream, [cut]) == whole for cut in range(len(stream)))
    assert parse(stream, list(range(len(stream)))) == whole


@pytest.mark.parametrize("rest", [b"da", b"data: 1", b"data: 1\n"])
def test_an_event_that_the_end_cuts_off_is_not_given_out(rest: bytes):
    parser = SseParser()
    assert parser.feed(b"data: 0\n\n" + rest) == [b"0"]
    assert parser.pending


@pytest.mark.parametrize(("rest", "event"), [(b"data: 1", [b"1"]), (b"data: 1\n", [b"1"]), (b"da", []), (b"", [])])
def test_the_last_event_may_lack_its_empty_line(rest: bytes, event: list[bytes]):
    parser = SseParser()
    parser.feed(b"data: 0\n\n" + rest)
    assert parser.last() == event


def test_after_whole_events_nothing_is_pending():
    parser = SseParser()
    parser.feed(b"data: 0\n\n")
    assert not parser.pending


def test_an_endless_line_is_refused():
    parser = SseParser(limit=15)
    assert parser.feed(b"data: 123") == []
    with pytest.raises(EngineProtocolError, match="over 15 bytes"):
        parser.feed(b"4567890")
