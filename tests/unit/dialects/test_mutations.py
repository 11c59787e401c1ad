"""Whatever a client sends, a dialect answers with its own 4xx that names the field, at once, and stays as it was."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rolltap.errors import RequestError
from rolltap.protocols.base import Dialect
from tests.dialects import DIALECTS

from ...contract.dialect_world import conversation_fields, stream_request

BODIES: dict[str, Any] = {name: conversation_fields(name) for name in DIALECTS}
AT_ONCE = 0.1
"""Seconds of its thread's processor time in which a request must be read or refused."""

patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""The tests measure processor time themselves; a busy machine's clock says nothing."""

JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=8),
    st.sampled_from(["", "assistant", "tool", "system", "data:image/png;base64,=A=", "http:///", "\x00", "call_1"]),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.sampled_from(["type", "text", "role", "id", "content"]), st.text(max_size=3), max_size=2),
    st.just({"type": "thinking"}),
)


def refused_or_read(dialect: Dialect, body: bytes) -> RequestError | None:
    """The refusal, if there is one; any other exception fails the test. The best time of three counts.

    A collection of the whole test process's garbage falls into one of them at most.
    """
    for _ in range(3):
        begun = time.thread_time()
        error = refusal(dialect, body)
        if time.thread_time() - begun < AT_ONCE:
            return error
    raise AssertionError(f"not read or refused within {AT_ONCE} s")


def refusal(dialect: Dialect, body: bytes) -> RequestError | None:
    try:
        dialect.parse(stream_request(dialect.name, body))
    except RequestError as error:
        reply = dialect.error(error)
        assert 400 <= reply.status < 500
        assert json.loads(reply.body)["error"]["message"]
        return error
    return None


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value."""
    out = [path] if path else []
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in entries:
        out += places(item, (*path, key))
    return out


def changed(value: Any, path: tuple[Any, ...], change: Any) -> Any:
    """The value with `change(old)` at the path; the change may return `...` to leave it out."""
    if not path:
        return change(value)
    copy = dict(value) if isinstance(value, dict) else list(value)
    new = changed(copy[path[0]], path[1:], change)
    if new is ...:
        del copy[path[0]]
    else:
        copy[path[0]] = new
    return copy


@st.composite
def mutants(draw: st.DrawFn, name: str) -> Any:
    """The golden conversation with one to three places replaced, left out or doubled."""
    body = BODIES[name]
    for _ in range(draw(st.integers(1, 3))):
        options = places(body)
        if not options:
            break
        path = draw(st.sampled_from(options))
        kind = draw(st.sampled_from(["replace", "drop", "double"]))
        junk = draw(JUNK)
        change: dict[str, Any] = {
            "replace": lambda _, junk=junk: junk,
            "drop": lambda _: ...,
            "double": lambda old: [*old, *old] if isinstance(old, list) else old,
        }
        body = changed(body, path, change[kind])
    return body


@pytest.mark.parametrize("name", list(DIALECTS))
@patient
@given(data=st.data())
def test_a_mutated_conversation_is_read_or_refused(name: str, data: st.DataObject) -> None:
    body = data.draw(mutants(name))
    refused_or_read(DIALECTS[name], json.dumps(body).encode())


@pytest.mark.parametrize("name", list(DIALECTS))
@patient
@given(body=st.binary(max_size=64))
@example(body=b'{"model":"m","messages":[{"role":"user","content":"\xed\xa0\x80"}]}')
@example(body=b'{"model":"m","input":"\\ud800 tail"}')
@example(body=b'{"a":1}' * 2)
def test_bytes_are_read_or_refused(name: str, body: bytes) -> None:
    refused_or_read(DIALECTS[name], body)


@pytest.mark.parametrize("name", list(DIALECTS))
def test_every_place_of_a_conversation_survives_junk(name: str) -> None:
    """Each place once, replaced by deep, wrong or hostile values: what is refused is refused by name."""
    deep: Any = []
    for _ in range(400):
        deep = [deep]
    surrogate = b'"\\ud83d"'
    for path in places(BODIES[name]):
        for junk in (deep, 7, {"type": "nothing"}, "junk"):
            body = changed(BODIES[name], path, lambda _, junk=junk: junk)
            error = refused_or_read(DIALECTS[name], json.dumps(body).encode())
            assert error is None or error.param is not None, (path, junk, error)
        marked = json.dumps(changed(BODIES[name], path, lambda _: "@@"))
        refused_or_read(DIALECTS[name], marked.encode().replace(b'"@@"', surrogate))


@pytest.mark.parametrize("name", list(DIALECTS))
def test_a_large_body_of_junk_is_refused_at_once(name: str) -> None:
    body = b'{"model":"m","messages":[' + b'{"role":"user","content":"x"},' * 300_000 + b"}"
    assert refused_or_read(DIALECTS[name], body) is not None
