"""A reply or a request that can't be read is shown as what it is, and keeps no page from the rest."""

from __future__ import annotations

import pytest

from rolltap.calllog.facts import RequestParts
from rolltap.reading.decoded import parse_request, preview, refused_view, reply_view

DEEP = b'{"role":"assistant","content":' + b"[" * 50_000 + b"]" * 50_000 + b"}"


@pytest.mark.parametrize("packed", [b"null", b"[]", b"\xff\xfe", b'{"role":5}', b'"x"', b"1e999", DEEP])
def test_a_reply_that_can_not_be_read_is_text(packed: bytes) -> None:
    shown = reply_view(packed)
    assert shown is not None
    assert shown.parts[0].text == packed.decode("utf-8", "replace")
    assert preview(packed) == (packed.decode("utf-8", "replace")[:200], ())


@pytest.mark.parametrize("head", [b"null", b"[]", b"\xff\xfe", b'"x"', b"1e999", DEEP, b"[" * 50_000])
def test_a_request_that_can_not_be_read_has_no_messages(head: bytes) -> None:
    request = RequestParts(head, (b'{"role":"user","content":"x"}',))
    assert parse_request("openai_chat", request) is None
    assert refused_view(request) is None
