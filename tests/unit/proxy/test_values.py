"""Bodies that a database or JSON can't hold are refused, however they are written."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi import Depends, FastAPI, Request
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st

from rolltap.errors import InvalidRequest
from rolltap.proxy.planes.bodies import MAX_DEPTH, _check_inside, check_values, is_suspect

BAD = (
    b'"a\\u0000"',
    b'"\\ud800"',
    b'"\\uDBFF x"',
    b'"\xed\xa0\x80"',
    b"9223372036854775808",
    b"-9223372036854775809",
    b"1e999",
    b"-1E+400",
    b"NaN",
    b"-Infinity",
    b"1" + b"0" * 400 + b".0",
)
ENCODINGS = ("utf-8", "utf-16", "utf-16-le", "utf-32-be")


def refusal(body: bytes) -> str:
    app = FastAPI()
    problems: list[str] = []

    @app.post("/", dependencies=[Depends(check_values)])
    async def route(request: Request) -> None: ...

    with TestClient(app) as client:
        try:
            client.post("/", content=body)
        except InvalidRequest as error:
            problems.append(error.message)
    return "".join(problems)


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("shape", [b'{"a": [1, {"b": %s}]}', b'{"a": {"x": "y"}, "list": [[], %s]}'])
def test_a_value_is_refused_wherever_it_stands(value: bytes, shape: bytes) -> None:
    assert refusal(shape.replace(b"%s", value))


def test_a_name_is_refused_as_a_value_is() -> None:
    assert refusal(b'{"a": {"b\\u0000": 1}}')


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_an_encoding_hides_nothing(encoding: str) -> None:
    assert refusal('{"a": "b\\u0000"}'.encode(encoding))
    assert refusal('{"a": 1e999}'.encode(encoding))


@pytest.mark.parametrize("more", ["", ' "e1234": "1234567890123456789",'])
def test_depth_has_a_limit(more: str) -> None:
    def nested(depth: int) -> bytes:
        return f'{{{more}"a": {"[" * depth}{"]" * depth}}}'.encode()

    assert "nested deeper" in refusal(nested(MAX_DEPTH + 1))
    assert "nested deeper" in refusal(nested(100_000))
    assert not refusal(nested(MAX_DEPTH - 2))


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(exclude_categories=()) | st.sampled_from("\0\ud800e19N")),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(JSON_VALUES, st.booleans())
def test_what_is_not_looked_at_closely_has_nothing_to_refuse(value: Any, ascii: bool) -> None:
    body = json.dumps(value, ensure_ascii=ascii).encode("utf-8", "surrogatepass")
    if not is_suspect(body):
        _check_inside(json.loads(body))
