"""Long bodies are read in slices: others run meanwhile, and what is refused is refused in the same words."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, Depends, FastAPI
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from rolltap.contract.admin import NewTask, SubmitTasks
from rolltap.contract.base import MAX_ENTRIES
from rolltap.contract.trainer import AnnotateLease, CallAnnotation, Rewind
from rolltap.proxy.planes import bodies
from rolltap.proxy.planes.apps import _app
from rolltap.proxy.planes.bodies import check_values, cut, sliced

TASK = {"id": "t", "instruction": "look", "spec": {"files": {f"f{n}": "" for n in range(200)}}}
MANY = 400


def app_of(route_class: Any) -> FastAPI:
    app = _app("test")
    routes = APIRouter(route_class=route_class) if route_class else APIRouter()

    @routes.post("/tasks")
    async def submit(body: SubmitTasks) -> dict[str, Any]:
        return {"tasks": [[type(task).__name__, task.id, task.spec] for task in body.tasks], "n": body.n}

    @routes.post("/annotations")
    async def annotate(body: AnnotateLease) -> dict[str, Any]:
        return {"calls": [[type(call).__name__, call.tokens] for call in body.calls]}

    @routes.post("/rewind")
    async def rewind(body: Rewind) -> dict[str, Any]:
        return body.versions

    app.include_router(routes, dependencies=[Depends(check_values)])
    return app


async def posted(route_class: Any, body: bytes, path: str = "/tasks") -> tuple[int, Any]:
    transport = httpx.ASGITransport(app_of(route_class))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        reply = await client.post(path, content=body, headers={"content-type": "application/json"})
    return reply.status_code, reply.json()


def body(*last: Any, **fields: Any) -> bytes:
    return json.dumps({"policy": "p", "n": 1, "tasks": [TASK] * MANY + list(last), **fields}).encode()


BODIES = {
    "sound": body(),
    "another n": body(n="many"),
    "an unknown field": body(surprise=1),
    "a task that is none": body(5),
    "a task without an id": body({"instruction": "x"}),
    "an unknown field of a task": body({**TASK, "surprise": 1}),
    "NUL in a task": body({**TASK, "instruction": "\0"}),
    "a long integer in a task": body({**TASK, "spec": {"n": 2**70}}),
    "too deep": body({**TASK, "spec": {"a": json.loads("[" * 80 + "]" * 80)}}),
    "NaN": body().replace(b'"n": 1', b'"n": NaN'),
    "no list": json.dumps({"policy": "p", "n": 1, "tasks": "x" * 300_000}).encode(),
    "no object": json.dumps([TASK] * MANY).encode(),
    "cut off": body()[:-100],
}


@pytest.mark.parametrize("name", BODIES)
async def test_the_answer_is_the_same_as_of_the_body_in_one_piece(name: str) -> None:
    assert len(BODIES[name]) > bodies.LONG_BODY
    whole = await posted(None, BODIES[name])
    assert await posted(sliced({"tasks": NewTask}), BODIES[name]) == whole
    assert whole[0] == (200 if name == "sound" else 400)


def annotated(*last: Any) -> bytes:
    calls = [{"call_id": f"c{n}", "logprobs": [-0.5, None] * 250} for n in range(MANY)]
    return json.dumps({"token": 1, "version": 1, "calls": calls + list(last)}).encode()


@pytest.mark.parametrize("last", [(), (5,), ({"call_id": "c", "logprobs": [1.0]},), ({"call_id": "c0"},)])
async def test_annotations_are_answered_the_same_as_in_one_piece(last: tuple[Any, ...]) -> None:
    assert len(annotated(*last)) > bodies.LONG_BODY
    whole = await posted(None, annotated(*last), "/annotations")
    assert await posted(sliced({"calls": CallAnnotation}), annotated(*last), "/annotations") == whole
    assert whole[0] == (400 if last else 200)


LARGE = b"[" + b"{}," * bodies.PIECE_VALUES + b"{}]"


@pytest.mark.parametrize(
    "large",
    [
        b'{"surprise": ' + LARGE + b"}",
        b'{"tasks": [{"spec": ' + LARGE + b"}]}",
        LARGE,
        LARGE[:-1],
        b'{"id": "' + b"x" * bodies.PIECE_BYTES + b'"}',
    ],
    ids=["a field", "an item", "a list", "no JSON", "text"],
)
async def test_what_takes_long_in_one_piece_is_refused(large: bytes) -> None:
    status, answer = await posted(sliced({"tasks": NewTask}), large)
    assert (status, answer["error"]["code"]) == (413, "body_too_large")


async def turns_beside(route_class: Any, body: bytes, path: str) -> int:
    """How often another task of the loop runs while a body is read."""
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    running = asyncio.create_task(other())
    await posted(route_class, body, path)
    running.cancel()
    return turns


READ_IN_SLICES = {
    "tasks": (sliced({"tasks": NewTask}), body(surprise=1), "/tasks"),
    "annotations": (sliced({"calls": CallAnnotation}), annotated(5), "/annotations"),
}


@pytest.mark.parametrize("name", READ_IN_SLICES)
async def test_others_run_while_it_is_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "SLICE_S", 0.0)
    route_class, sent, path = READ_IN_SLICES[name]
    assert await turns_beside(route_class, sent, path) > await turns_beside(None, sent, path) + MANY // 2


SMALL_ITEMS = 4 << 20
TINY = {
    "numbers": b'{"tasks": [' + b"1," * (SMALL_ITEMS // 2) + b"1]}",
    "objects": b'{"tasks": [' + b"{}," * (SMALL_ITEMS // 3) + b"{}]}",
    "fields": b"{" + b",".join(b'"%x":1' % number for number in range(SMALL_ITEMS // 8)) + b"}",
    "escapes": b'{"tasks": ["' + b'\\"' * (SMALL_ITEMS // 2) + b'", 1]}',
    "lists of lists": b'{"tasks": [' + (b"[" + b"[]," * 50_000 + b"[]],") * (SMALL_ITEMS // 150_000) + b"1]}",
    "no end": b'{"tasks": [' + b"[" * SMALL_ITEMS,
    "spaces": b'{"tasks": [' + b" " * SMALL_ITEMS + b"1]}",
}
HELD_S = 0.25
"""Processor time, so that a busy machine is no reason. In one piece the first of these took 0.9 s on a quiet core."""


async def held_by(route_class: Any, body: bytes, path: str = "/tasks") -> float:
    """The longest time that a refused body holds other tasks of the loop, in seconds."""
    longest, last = 0.0, time.thread_time()

    async def other() -> None:
        nonlocal longest, last
        while True:
            await asyncio.sleep(0)
            now = time.thread_time()
            longest, last = max(longest, now - last), now

    running = asyncio.create_task(other())
    status, _ = await posted(route_class, body, path)
    longest = max(longest, time.thread_time() - last)  # the answer comes in the same turn as the last look at the body
    running.cancel()
    assert status in (400, 413)
    return longest


@pytest.mark.parametrize("name", TINY)
async def test_the_smallest_items_hold_nobody(name: str) -> None:
    """4 MB of them: what they are cut into, decoded and refused in short steps, or not at all."""
    assert await held_by(sliced({"tasks": NewTask}), TINY[name]) < HELD_S


@pytest.mark.parametrize(
    ("path", "refused"),
    [
        ("/annotations", b'{"token": 1, "version": 1, "calls": [{"call_id": "c", "logprobs": [%s]}]}'),
        ("/annotations", b'{"token": 1, "version": 1, "calls": [%s]}'),
        ("/tasks", b'{"policy": "p", "n": 1, "tasks": [%s]}'),
    ],
)
async def test_values_that_are_all_refused_end_with_the_first(path: str, refused: bytes) -> None:
    """As many as a piece may have. An error for each of them takes seconds."""
    values = b",".join([b'""'] * (bodies.PIECE_VALUES - 100))
    assert await held_by(sliced({}), refused % values, path) < HELD_S


async def test_a_table_has_a_most_of_entries() -> None:
    table = {str(number): "" for number in range(MAX_ENTRIES + 1)}
    status, answer = await posted(
        sliced({}), json.dumps({"step": 0, "run": "r", "versions": table}).encode(), "/rewind"
    )
    assert (status, answer["error"]["param"]) == (400, "versions")
    assert "10,001 entries are more than 10,000" in answer["error"]["message"]


SOUND = [
    '{"a": 1, "tasks": [], "b": [{"c": "}]"}], "tasks": [1, [2], "x,]", {"y": {}}] }',
    '{"tasks" : [ "\\"", "\\\\", "\u00e9" ] , "a":{}}',
    "{}",
    ' {"a": "b"}\n',
]
UNSOUND = [
    "",
    "[]",
    "{",
    '{"a"}',
    '{"a": 1,}',
    '{"a": 1} x',
    '{"tasks": [1,]}',
    '{"tasks": [1}',
    '{"a": "x',
    "{1: 2}",
    "{,}",
]


def put_together(text: str) -> dict[str, Any]:
    """The parts of a body."""
    fields = bodies._Fields(text.encode("utf-8", "surrogatepass"), {"tasks": TypeAdapter(Any)})
    for part in cut(fields._raw, fields.lists):
        fields.take(part)
    return fields.body


@pytest.mark.parametrize("text", SOUND)
def test_the_parts_are_the_body(text: str) -> None:
    assert put_together(text) == json.loads(text)


@pytest.mark.parametrize("text", UNSOUND)
def test_what_is_not_sound_is_not_cut(text: str) -> None:
    with pytest.raises(ValueError):
        put_together(text)


TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9999, 9999) | TEXT,
    lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner),
)


@settings(max_examples=50)
@given(VALUES, st.integers(8, 64))
def test_any_sound_body_is_cut_into_itself(value: Any, step: int) -> None:
    body = {"tasks": [value, [value]], "other": value}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "STEP_BYTES", step)
        for text in (json.dumps(body), json.dumps(body, ensure_ascii=False, indent=1)):
            assert put_together(text) == body
