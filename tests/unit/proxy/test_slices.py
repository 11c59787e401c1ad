"""Long bodies are read in slices: others run meanwhile, and what is refused is refused in the same words."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, Depends, FastAPI

from rolltap.contract.admin import NewTask, SubmitTasks
from rolltap.contract.annotations import AnnotateLease, CallAnnotation
from rolltap.proxy.planes import _app
from rolltap.proxy.routes import slices
from rolltap.proxy.routes.slices import sliced
from rolltap.proxy.routes.values import check_values

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
    assert len(BODIES[name]) > slices.LONG_BODY
    whole = await posted(None, BODIES[name])
    assert await posted(sliced({"tasks": NewTask}), BODIES[name]) == whole
    assert whole[0] == (200 if name == "sound" else 400)


def annotated(*last: Any) -> bytes:
    calls = [{"call_id": f"c{n}", "logprobs": [-0.5, None] * 250} for n in range(MANY)]
    return json.dumps({"token": 1, "version": 1, "calls": calls + list(last)}).encode()


@pytest.mark.parametrize("last", [(), (5,), ({"call_id": "c", "logprobs": [1.0]},), ({"call_id": "c0"},)])
async def test_annotations_are_answered_the_same_as_in_one_piece(last: tuple[Any, ...]) -> None:
    assert len(annotated(*last)) > slices.LONG_BODY
    whole = await posted(None, annotated(*last), "/annotations")
    assert await posted(sliced({"calls": CallAnnotation}), annotated(*last), "/annotations") == whole
    assert whole[0] == (400 if last else 200)


LARGE = b"[" + b"{}," * slices.PIECE_VALUES + b"{}]"


@pytest.mark.parametrize(
    "large",
    [
        b'{"surprise": ' + LARGE + b"}",
        b'{"tasks": [{"spec": ' + LARGE + b"}]}",
        LARGE,
        LARGE[:-1],
        b'{"id": "' + b"x" * slices.PIECE_BYTES + b'"}',
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
    monkeypatch.setattr(slices, "SLICE_S", 0.0)
    route_class, sent, path = READ_IN_SLICES[name]
    assert await turns_beside(route_class, sent, path) > await turns_beside(None, sent, path) + MANY // 2
