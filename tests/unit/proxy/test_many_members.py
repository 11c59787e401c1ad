"""Compressed bodies of very many short parts: their time would grow with the square of their size."""

from __future__ import annotations

import gzip
import time
from collections.abc import Callable

import pytest
import zstandard

from rolltap.errors import InvalidRequest
from rolltap.proxy.call.http_exchange import MEMBERS, decoded

LIMIT = 50_000_000


@pytest.mark.parametrize(("name", "packed"), [("gzip", gzip.compress), ("zstd", zstandard.ZstdCompressor().compress)])
def test_a_body_of_very_many_parts_is_refused_at_once(name: str, packed: Callable[[bytes], bytes]) -> None:
    assert decoded(packed(b"{") * (MEMBERS - 1) + packed(b"}"), [name], LIMIT) == b"{" * (MEMBERS - 1) + b"}"
    assert decoded(b"", [name], LIMIT) == b""
    began = time.process_time()
    with pytest.raises(InvalidRequest, match="parts"):
        decoded(packed(b"") * 100_000, [name], LIMIT)
    assert time.process_time() - began < 1.0
