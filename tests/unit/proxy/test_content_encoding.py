"""Compressed bodies are read within the limit; a bomb and an unknown encoding are refused."""

from __future__ import annotations

import asyncio
import gzip
import json
import tracemalloc
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from rolltap.errors import BodyTooLarge, InvalidRequest
from rolltap.proxy.call.http_exchange import decoded, encodings_of

PATH = "/v1/chat/completions"
BODY = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "héllo " * 60}]}).encode()


def bare_deflate(data: bytes) -> bytes:
    stream = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return stream.compress(data) + stream.flush()


def streamed_zstd(data: bytes) -> bytes:
    stream = zstandard.ZstdCompressor().compressobj()
    return stream.compress(data) + stream.flush()


ENCODE: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": ("gzip", gzip.compress),
    "x-gzip": ("x-gzip", gzip.compress),
    "gzip in members": ("gzip", lambda data: gzip.compress(data[:9]) + gzip.compress(data[9:])),
    "deflate": ("deflate", zlib.compress),
    "bare deflate": ("deflate", bare_deflate),
    "zstd": ("zstd", zstandard.ZstdCompressor(level=19).compress),
    "zstd of unknown size": ("zstd", streamed_zstd),
    "zstd in frames": ("zstd", lambda data: streamed_zstd(data[:9]) + streamed_zstd(data[9:])),
}


@pytest.mark.parametrize("way", ENCODE)
@given(data=st.binary(max_size=2000) | st.integers(0, 600_000).map(lambda size: b"ab" * size))
def test_what_was_encoded_is_decoded(way: str, data: bytes) -> None:
    header, encode = ENCODE[way]
    assert decoded(encode(data), encodings_of(header), 2_000_000) == data


@pytest.mark.parametrize("way", ENCODE)
@given(data=st.data())
def test_a_broken_body_is_refused_by_its_header(way: str, data: st.DataObject) -> None:
    header, encode = ENCODE[way]
    whole = encode(BODY)
    cut = data.draw(st.integers(1, len(whole) - 1))
    try:
        beginning = decoded(whole[:cut], encodings_of(header), 2_000_000)
    except InvalidRequest as error:
        param = error.param
    else:
        assert beginning == BODY[:9], "cut between two members"
        return
    assert param == "content-encoding"


@pytest.mark.parametrize("way", ENCODE)
def test_a_bomb_is_refused_before_it_is_whole(way: str) -> None:
    header, encode = ENCODE[way]
    bomb = encode(bytes(100_000_000))
    tracemalloc.start()
    with pytest.raises(BodyTooLarge):
        decoded(bomb, encodings_of(header), 1_000_000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 40_000_000


def test_a_frame_that_needs_much_memory_is_refused() -> None:
    parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=27)
    frame = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    with pytest.raises(InvalidRequest, match="zstd"):
        decoded(frame.compress(bytes(200_000_000)) + frame.flush(), ["zstd"], 1_000_000)


@pytest.mark.parametrize("way", ENCODE)
async def test_a_compressed_call_is_answered(plane: Any, way: str) -> None:
    header, encode = ENCODE[way]
    answer = await plane.client.post(PATH, encode(BODY), headers={"content-encoding": header})
    assert answer.status == 200, answer.body
    (row,) = await plane.rows()
    assert row.intent.request.items[0] in BODY


@pytest.mark.parametrize("header", ["identity", "", "gzip, zstd", "GZIP"])
async def test_encodings_in_a_row(plane: Any, header: str) -> None:
    body = BODY
    for name in encodings_of(header):
        body = ENCODE[name][1](body)
    assert (await plane.client.post(PATH, body, headers={"content-encoding": header})).status == 200


@pytest.mark.parametrize("header", ["br", "gzip, br", "gzip, gzip, gzip", "snappy"])
async def test_another_encoding_is_a_415_that_names_the_header(plane: Any, header: str) -> None:
    answer = await plane.client.post(PATH, BODY, headers={"content-encoding": header})
    assert (answer.status, answer.json()["error"]["param"]) == (415, "content-encoding")
    assert "Content-Encoding" in answer.json()["error"]["message"]
    (row,) = await plane.rows()
    assert row.completion.error.startswith("unsupported_encoding")


async def test_a_bomb_is_a_413_and_recorded(plane: Any) -> None:
    answer = await plane.client.post(PATH, gzip.compress(bytes(3_000_000)), headers={"content-encoding": "gzip"})
    assert answer.status == 413
    (row,) = await plane.rows()
    assert row.completion.outcome == "refused"


async def test_nothing_is_decoded_for_an_unknown_key(plane: Any) -> None:
    body = gzip.compress(bytes(3_000_000))
    answer = await plane.client.post(PATH, body, headers={"content-encoding": "gzip"}, key="rt-nobody")
    assert answer.status == 401


async def test_other_calls_go_on_meanwhile(plane: Any) -> None:
    headers = {"content-encoding": "gzip"}
    long = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "a " * 300_000}]}).encode()
    answers = await asyncio.gather(
        plane.client.post(PATH, gzip.compress(long), headers=headers),
        plane.client.post(PATH, BODY),
    )
    assert [answer.status for answer in answers] == [400, 200]  # the long one does not fit the context
