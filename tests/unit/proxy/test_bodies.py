"""Bodies of the trainer and admin planes: what is refused, in which words, and for how long others wait.

The bad bodies are generated from the planes' own OpenAPI documents: every field of every body, missing, of every wrong
type, out of range, with an unknown neighbour, with text or numbers that a store can't hold.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import json
import re
import time
from collections.abc import Iterator
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolltap.contract.admin import FinishRollout, HarnessLog, LogEntry, NewReward, OpenSession, SubmitTasks
from rolltap.contract.base import MAX_DEPTH, RequestBody
from rolltap.contract.keys import Caller
from rolltap.contract.trainer import MAX_TOKENS, AnnotateLease, Rewind, ScoreIds, Transfer
from rolltap.errors import BodyTooLarge, InvalidRequest
from rolltap.proxy.planes import bodies
from rolltap.proxy.planes.apps import admin_app, trainer_app
from rolltap.proxy.planes.bodies import NO_OBJECT, read_body
from rolltap.proxy.server import settle_memory

JSON = "application/json"
Body = dict[str, Any]
Schema = dict[str, Any]


class Plane:
    """A plane without anything behind it: a body that is not refused finds nothing there."""

    def __init__(self, name: str) -> None:
        keyring, services = MagicMock(), MagicMock()
        keyring.caller = AsyncMock(return_value=Caller("admin", "admin"))
        services.ledger.audit.append = AsyncMock()
        self.app = {"admin": admin_app, "trainer": trainer_app}[name](services, keyring)
        self.document = self.app.openapi()

    def bodies(self) -> Iterator[tuple[str, Schema]]:
        for path, methods in self.document["paths"].items():
            if content := methods.get("post", {}).get("requestBody", {}).get("content"):
                yield path, content[JSON]["schema"]

    def kinds(self, schema: Schema) -> list[Schema]:
        """The schemas of which a value has one."""
        if "$ref" in schema:
            schema = self.document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        return [kind for each in schema["anyOf"] for kind in self.kinds(each)] if "anyOf" in schema else [schema]

    def sound(self, schema: Schema) -> Any:
        """A value of the schema, with as little as it needs."""
        kind = self.kinds(schema)[0]
        if "enum" in kind:
            return kind["enum"][0]
        match kind.get("type"):
            case "object":
                return {name: self.sound(kind["properties"][name]) for name in kind.get("required", ())}
            case "array" if "prefixItems" in kind:
                return [self.sound(item) for item in kind["prefixItems"]]
            case "array":
                return [self.sound(kind["items"])] * max(1, kind.get("minItems", 1))
            case "integer" | "number":
                return max(1, kind.get("minimum", 1))
        return {"string": "abc", "boolean": True}.get(kind.get("type", ""), {})

    async def post(
        self, http: httpx.AsyncClient, path: str, content: bytes, media_type: str = JSON
    ) -> tuple[int, Body]:
        headers = {"content-type": media_type, "authorization": "Bearer k"}
        reply = await http.post(path.replace("{", "").replace("}", ""), content=content, headers=headers)
        return reply.status_code, reply.json()["error"]

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://test")


SAMPLES = {"string": "x", "integer": 7, "number": 0.5, "boolean": True, "null": None, "array": [], "object": {}}
Bad = tuple[str, Any, Body]
"""The field that is refused, what it is given (for the test's report), and the body."""


def bad_bodies(plane: Plane, schema: Schema, body: Body, at: tuple[Any, ...] = ()) -> Iterator[Bad]:
    """Bodies that break `schema` at one place below `at`, and are `body` elsewhere."""

    def with_value(place: tuple[Any, ...], value: Any, *, missing: bool = False) -> Bad:
        changed: Any = {"": copy.deepcopy(body)}
        inner, last = changed, ""
        for step in place:
            inner, last = inner[last], step
        if missing:
            del inner[last]
        else:
            inner[last] = value
        return ".".join(map(str, place)), "missing" if missing else value, changed[""]

    kinds = plane.kinds(schema)
    types = {kind.get("type", "string" if "enum" in kind else "any") for kind in kinds}
    numbers = {"integer"} if "number" in types else set()
    if at:
        for name, value in SAMPLES.items():
            if "any" not in types and name not in types | numbers:
                yield with_value(at, value)
    for kind in kinds:
        if at and "enum" in kind:
            yield with_value(at, "nonsense")
        if at and kind.get("type") in ("integer", "number"):
            bounds = {"minimum": -1, "maximum": 1, "exclusiveMinimum": 0, "exclusiveMaximum": 0}
            yield from (
                with_value(at, kind[name] + step) for name, step in bounds.items() if abs(kind.get(name, 1e99)) < 1e15
            )
        if at and kind.get("type") == "string" and "enum" not in kind:
            yield from [with_value(at, "")] if kind.get("minLength") else []
            yield from [with_value(at, "x" * (kind["maxLength"] + 1))] if kind.get("maxLength", 1e9) < 1e5 else []
        if at and kind.get("type") == "array":
            yield from [with_value(at, [])] if kind.get("minItems") else []
            whole = with_value(at, plane.sound(kind))[2]
            for place, item in enumerate(kind.get("prefixItems", [kind["items"]])):
                yield from bad_bodies(plane, item, whole, (*at, place))
        if kind.get("additionalProperties") is False:
            inner: Any = body
            for step in at:
                inner = inner[step]
            yield with_value((*at, "surprise"), 1)
            yield from (with_value((*at, name), None, missing=True) for name in kind.get("required", ()))
            for name, field in kind["properties"].items():
                whole = body if name in inner else with_value((*at, name), plane.sound(field))[2]
                yield from bad_bodies(plane, field, whole, (*at, name))
        elif at and isinstance(kind.get("additionalProperties"), dict):
            whole = with_value(at, {"name": None})[2]
            yield from bad_bodies(plane, kind["additionalProperties"], whole, (*at, "name"))


@pytest.mark.parametrize("name", ["admin", "trainer"])
async def test_a_refusal_names_the_field_and_what_is_wrong_with_it(name: str) -> None:
    plane, refused = Plane(name), 0
    async with plane.client() as http:
        for path, schema in plane.bodies():
            for field, given, body in bad_bodies(plane, schema, plane.sound(schema)):
                status, error = await plane.post(http, path, json.dumps(body).encode())
                case = (path, field, given, error)
                assert (status, error["code"]) == (400, "invalid_request"), case
                if error["param"] in (field, re.sub(r"\.name$", ".*", field)):
                    assert error["message"].startswith(f"{error['param']}: "), case
                    refused += 1
                else:  # what no annotation can say was checked first, of an item that had been read
                    assert "Expected" not in error["message"], case
    assert refused > 400


@pytest.mark.parametrize("name", ["admin", "trainer"])
async def test_a_refused_choice_comes_with_the_known_ones(name: str) -> None:
    plane, refused = Plane(name), 0
    async with plane.client() as http:
        for path, schema in plane.bodies():
            for field, given, body in bad_bodies(plane, schema, plane.sound(schema)):
                if given == "nonsense":
                    _, error = await plane.post(http, path, json.dumps(body).encode())
                    assert error["message"].startswith(f"{field}: Invalid enum value 'nonsense'; known: "), error
                    refused += 1
    assert refused


NOT_JSON = {
    "nothing": b"",
    "text": b"hello",
    "cut off": b'{"a": 1',
    "more behind it": b"{} x",
    "NaN": b'{"n": NaN}',
    "an infinity": b'{"n": -Infinity}',
    "Latin-1": b'{"n": "\xff"}',
    "a lone surrogate": b'{"n": "\\ud800"}',
    "another lone surrogate": b'{"n": "\xed\xa0\x80"}',
    "UTF-16": '{"n": 1}'.encode("utf-16"),
    "an object in a list": b"[{}]",
    "null": b"null",
    "a number": b"5",
    "too deep": b'{"n":' + b"[" * 15_000 + b"]" * 15_000 + b"}",  # Python 3.13 takes 9,000
}


@pytest.mark.parametrize("case", NOT_JSON)
async def test_what_is_no_object_of_json_is_refused_on_every_route(case: str) -> None:
    for plane in map(Plane, ("admin", "trainer")):
        async with plane.client() as http:
            for path, _ in plane.bodies():
                status, error = await plane.post(http, path, NOT_JSON[case])
                assert (status, error["code"]) == (400, "invalid_request"), (path, error)
                assert "body" in error["message"] or error["param"] == "n", (path, error)


async def test_another_media_type_is_refused() -> None:
    plane = Plane("admin")
    async with plane.client() as http:
        for media_type in ("text/plain", "", "application/x-www-form-urlencoded"):
            assert await plane.post(http, "/keys", b"{}", media_type) == (
                400,
                {"code": "invalid_request", "message": NO_OBJECT, "param": None},
            )


async def refusal(kind: type[RequestBody], body: bytes) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as refused:
        await read_body(body, kind)
    return refused.value


def task(spec: str) -> bytes:
    return f'{{"policy": "p", "n": 1, "tasks": [{{"id": "t", "instruction": "look", "spec": {spec}}}]}}'.encode()


BAD = {
    '"a\\u0000"': "NUL",
    '"\\\\\\u0000"': "NUL",
    '{"b\\u0000": 1}': "NUL",
    "9223372036854775808": "64 bits",
    "-9223372036854775809": "64 bits",
    "1e999": "not a finite",
    "-1E+400": "not a finite",
    f"1{'0' * 400}": "64 bits",
    f"1{'0' * 400}.0": "not a finite",
    "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1): "nested deeper",
}


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("shape", ['{"a": [1, {"b": %s}]}', '{"a": {"x": "y"}, "list": [[], %s]}'])
async def test_a_value_that_no_store_holds_is_refused_wherever_it_stands(value: str, shape: str) -> None:
    free = shape.replace("%s", value)
    assert BAD[value] in (await refusal(SubmitTasks, task(free))).message
    reward = f'{{"rollout_id": "r", "value": 1, "detail": {free}}}'.encode()
    assert BAD[value] in (await refusal(NewReward, reward)).message


async def test_text_that_only_looks_like_nul_is_sound() -> None:
    body = await read_body(task('{"a": "\\\\u0000"}'), SubmitTasks)
    assert body.tasks[0].spec == {"a": "\\u0000"}


TASK = {"id": "t", "instruction": "look", "spec": {"files": {f"f{n}": "" for n in range(200)}}}
MANY = 400


def tasks(*last: Any, **fields: Any) -> bytes:
    return json.dumps({"policy": "p", "n": 1, "tasks": [TASK] * MANY + list(last), **fields}).encode()


def annotated(*last: Any) -> bytes:
    """With a list of numbers that is itself read in pieces."""
    calls = [{"call_id": f"c{n}", "logprobs": [-0.5, None] * 250} for n in range(MANY)]
    calls[0] = {"call_id": "c0", "logprobs": [-0.5, None, -1] * 4000, "clipped": [True, None, False] * 4000}
    return json.dumps({"token": 1, "version": 1, "calls": calls + list(last)}).encode()


def plain(body: RequestBody) -> Any:
    """What a body says, whether its numbers are in lists or in arrays."""
    if not isinstance(body, AnnotateLease):
        return body
    return body.token, [(call.call_id, {k: v.tolist() for k, v in call.arrays().items()}) for call in body.calls]


LONG: dict[str, tuple[type[RequestBody], bytes]] = {
    "sound": (SubmitTasks, tasks()),
    "no tasks": (SubmitTasks, tasks(tasks="x" * 300_000)),
    "another n": (SubmitTasks, tasks(n="many")),
    "without n": (SubmitTasks, tasks().replace(b'"n": 1, ', b"")),
    "an unknown field": (SubmitTasks, tasks(surprise=1)),
    "a task that is none": (SubmitTasks, tasks(5)),
    "a task without an id": (SubmitTasks, tasks({"instruction": "x"})),
    "an unknown field of a task": (SubmitTasks, tasks({**TASK, "surprise": 1})),
    "a long id": (SubmitTasks, tasks({**TASK, "id": "x" * 257})),
    "NUL in a task": (SubmitTasks, tasks({**TASK, "instruction": "\0"})),
    "a rule": (SubmitTasks, tasks(rule={"late": "never"})),
    "annotations": (AnnotateLease, annotated()),
    "an annotation that is none": (AnnotateLease, annotated(5)),
    "text among many log-probs": (AnnotateLease, annotated({"call_id": "c", "logprobs": [-1.5] * 9000 + ["x"]})),
    "true among many log-probs": (AnnotateLease, annotated({"call_id": "c", "logprobs": [-1.5] * 9000 + [True]})),
    "a positive log-prob": (AnnotateLease, annotated({"call_id": "c", "logprobs": [1.0]})),
    "a call twice": (AnnotateLease, annotated({"call_id": "c0", "logprobs": [-1.0]})),
    "too many calls": (AnnotateLease, annotated(*({"call_id": f"d{n}", "logprobs": [-1.0]} for n in range(1000)))),
}


@pytest.mark.parametrize("name", LONG)
async def test_a_body_in_pieces_is_read_as_in_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, body = LONG[name]
    assert len(body) > bodies.LONG_BODY

    async def outcome() -> Any:
        try:
            return repr(plain(await read_body(body, kind)))  # as NaN differs from itself
        except InvalidRequest as error:
            return error.message.replace(f"{name}: ", ""), error.param

    in_pieces = await outcome()
    monkeypatch.setattr(bodies, "LONG_BODY", len(body))
    monkeypatch.setattr(bodies, "MAX_BODY", len(body))
    assert in_pieces == await outcome() or ((in_pieces[1] or "").startswith("tasks.") and "NUL" in in_pieces[0])
    assert isinstance(in_pieces, str) == (name in ("sound", "annotations"))


ENTRIES = st.lists(
    st.builds(LogEntry, st.sampled_from(["user", "assistant", "tool"]), st.text('ab\\"é]},', max_size=9)), max_size=20
)


@settings(max_examples=50)
@given(ENTRIES, st.booleans())
def test_any_log_is_itself_in_pieces(entries: list[LogEntry], ascii: bool) -> None:
    log = [{"role": entry.role, "id": entry.id} for entry in entries]
    body = json.dumps({"entries": log, "complete": False}, ensure_ascii=ascii, indent=1).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "LONG_BODY", 0)
        assert asyncio.run(read_body(body, HarnessLog)) == HarnessLog(entries, complete=False)


@pytest.fixture(scope="module")
def settled() -> Iterator[None]:
    """The garbage collector as a server has it: it would look through all that tests have imported.

    What it no longer looks at stays so: each collection of a later test would take two seconds.
    """
    before = gc.get_threshold()
    settle_memory()
    yield
    gc.set_threshold(*before)


async def held_by(kind: type[RequestBody], body: bytes) -> float:
    """The longest time that reading a body holds other tasks of the loop, in seconds of this thread's processor time: a
    busy machine is no reason."""
    longest, last = 0.0, time.thread_time()

    async def other() -> None:
        nonlocal longest, last
        while True:
            await asyncio.sleep(0)
            now = time.thread_time()
            longest, last = max(longest, now - last), now

    running = asyncio.create_task(other())
    await asyncio.sleep(0)
    last = time.thread_time()
    with contextlib.suppress(InvalidRequest, BodyTooLarge):
        await read_body(body, kind)
    longest = max(longest, time.thread_time() - last)  # the end comes in the same turn as the last look at the body
    running.cancel()
    return longest


MIB = 1 << 20


def filled(head: bytes, unit: bytes, tail: bytes, size: int = MIB) -> bytes:
    return head + unit * ((size - len(head) - len(tail)) // len(unit)) + tail


SMALL = b'{"id":"t","instruction":""}'
OF_A_TASK = b'{"policy": "p", "n": 1, "tasks": [{"id": "t", "instruction": "", "spec": {"a": ['
OF_A_CALL = b'{"token": 1, "version": 1, "calls": [{"call_id": "c", "logprobs": ['
BUCKET = json.dumps(
    {"names": ["model.layers.7.up.weight"] * 99, "dtypes": ["bf16"] * 99, "shapes": [[64, 64]] * 99}
).encode()
TRANSFER = (
    b'], "trainer": "t", "incarnation": 1, "version": 1, "digest": "d", "address": "a", "port": 1, "group": "g", '
    b'"world_size": 2, "backend": "gloo", "timeout_s": 1}'
)
WORST: dict[str, tuple[type[RequestBody], bytes]] = {
    "tasks that are numbers": (SubmitTasks, filled(b'{"policy": "p", "n": 1, "tasks": [', b"1,", b"1]}")),
    "small tasks": (SubmitTasks, filled(b'{"policy": "p", "n": 1, "tasks": [', SMALL + b",", SMALL + b"]}", MIB // 4)),
    "empty lists": (SubmitTasks, filled(OF_A_TASK, b"[],", b"0]}}]}")),
    "few empty lists": (SubmitTasks, filled(OF_A_TASK, b"[],", b"0]}}]}", 29_000)),
    "few objects": (SubmitTasks, filled(OF_A_TASK, b'{"":{}},', b"0]}}]}", 38_000)),
    "tags": (SubmitTasks, filled(b'{"policy": "p", "n": 1, "tasks": [], "tags": [', b'"",', b'""]}')),
    "entries": (HarnessLog, filled(b'{"entries": [', b'{"role":"user"},', b'{"role":"user"}]}', MIB // 4)),
    "log-probs": (AnnotateLease, filled(OF_A_CALL, b"-0.123456789012345,", b"-1]}]}")),
    "small log-probs": (AnnotateLease, filled(OF_A_CALL, b"-2.2250738585072011e-308,", b"-1]}]}")),
    "log-probs between two floats": (AnnotateLease, filled(OF_A_CALL, b"-9007199254740993.00,", b"-1]}]}")),
    "short log-probs": (AnnotateLease, filled(OF_A_CALL, b"0,", b"0]}]}", 1 << 19)),
    "log-probs that are text": (AnnotateLease, filled(OF_A_CALL, b'"",', b'""]}]}')),
    "ids": (ScoreIds, filled(b'{"sequences": [{"start": 1, "token_ids": [', b"12345,", b"1]}]}")),
    "versions": (Rewind, b'{"step":0,"run":"r","versions":{%s}}' % b",".join(b'"%x":0' % n for n in range(100_000))),
    "text": (SubmitTasks, filled(b'{"policy": "', b"\\u00e9a", b'"}')),
    "spaces": (SubmitTasks, filled(b'{"tasks": [', b" ", b"1]}")),
    "no end": (SubmitTasks, filled(b'{"tasks": [', b"[", b"")),
    "no log-probs": (AnnotateLease, filled(OF_A_CALL, b"null,", b"null]}]}")),
    "log-probs of 4 MiB": (AnnotateLease, filled(OF_A_CALL, b"-0.12345678901234,", b"-1]}]}", 4 * MIB)),
    "short ids of 4 MiB": (ScoreIds, filled(b'{"sequences": [{"start": 1, "token_ids": [', b"1,", b"1]}]}", 4 * MIB)),
    "smallest entries": (HarnessLog, filled(b'{"entries": [', b'{"role":1},', b'{"role":1}]}')),
    "duplicate keys": (SubmitTasks, filled(OF_A_TASK, b'{"a":1},', b"0]}}]}")),
    "duplicate fields": (SubmitTasks, filled(b'{"n": 1, "tasks": [],', b'"policy":1,', b'"policy":"p"}')),
    "long numbers": (SubmitTasks, filled(OF_A_TASK, b"1" * 4000 + b",", b"0]}}]}")),
    "a long fraction": (SubmitTasks, filled(OF_A_TASK + b"0.", b"1", b"]}}]}")),
    "text that looks like NUL": (
        SubmitTasks,
        filled(b'{"policy": "p", "n": 1, "tasks": [{"id":"', b"\\\\u0000", b'"}]}'),
    ),
    "buckets": (Transfer, filled(b'{"buckets": [', BUCKET + b",", BUCKET + TRANSFER, 7 * MIB)),
    "a bucket": (Transfer, filled(b'{"buckets": [{"names": [', b'"' + b"n" * 80 + b'",', b'""]}' + TRANSFER, 7 * MIB)),
    "all of a call": (
        AnnotateLease,
        OF_A_CALL
        + b'],"entropy":['.join(b",".join([number] * MAX_TOKENS) for number in (b"-0.1234567890123456", b"0.5"))
        + b'],"clipped":[%b]}]}' % b",".join([b"true"] * MAX_TOKENS),
    ),
    "a rule's text": (OpenSession, filled(b'{"rules": {"messages": [{"text": "', b"x", b'"}]}}')),
    "tags of sessions": (OpenSession, json.dumps({"tags": {f"t{n}": "x" * 8192 for n in range(32)}}).encode()),
}
HELD_S = 0.03
"""Of a quiet core most take under 0.005 s, and all about 0.01 s at most."""


PATTERNS = (
    "a",
    "a{1000}",
    "(a|b){1,100}",
    r"\w{1,100}",
    r"\pL",
    r"\PM",
    "[^\u00e9]{99}",
    ".{9}",
    r"(?i)[\p{Han}x]",
    "()",
    "|",
)
"""What RE2 reads in 0.1 to 150 ms, where a pattern is full of it."""


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("count", [1, 20, 64, 6000])
@pytest.mark.parametrize("unit", PATTERNS)
async def test_patterns_hold_nobody_for_long(unit: str, count: int) -> None:
    """64 masks of `\\w{1,100}` held a server for eleven seconds."""
    for chars in (40, 400, 990):
        masks = [{"pattern": f"{count}x{chars}x{n}" + unit * (chars // len(unit))} for n in range(count)]
        body = json.dumps({"rules": {"masks": masks}}).encode()
        if len(body) <= MIB:
            assert await held_by(OpenSession, body) < HELD_S, chars  # once: what was read is known


FILES = {f"f{number}.py": "x = 1\n" * 70 for number in range(20)}
LOGPROBS = [-(number % 997) / 331 for number in range(49_000)]
LEGAL: dict[str, tuple[type[RequestBody], Any]] = {
    "tasks": (
        SubmitTasks,
        {"policy": "p", "n": 1, "tasks": [{"id": "t", "instruction": "look", "spec": {"files": FILES}}] * 95},
    ),
    "values of a task": (
        SubmitTasks,
        {"policy": "p", "n": 1, "tasks": [{"id": "t", "instruction": "", "spec": {"a": [1] * 19_900}}]},
    ),
    "a task's text": (
        SubmitTasks,
        {"policy": "p", "n": 1, "tasks": [{"id": "t", "instruction": "x\n" * 340_000}]},
    ),
    "log-probs of a call": (
        AnnotateLease,
        {"token": 1, "version": 1, "calls": [{"call_id": "c", "logprobs": LOGPROBS}]},
    ),
    "log-probs of 64 calls": (
        AnnotateLease,
        {"token": 1, "version": 1, "calls": [{"call_id": f"c{n}", "logprobs": LOGPROBS[:760]} for n in range(64)]},
    ),
    "ids to score": (ScoreIds, {"sequences": [{"start": 1, "token_ids": [*range(100_000, 230_000)]}]}),
    "an evaluation": (FinishRollout, {"status": "succeeded", "evaluation": "x\n" * 340_000}),
    "a log": (HarnessLog, {"entries": [{"role": "assistant", "id": f"chatcmpl-{n}"} for n in range(19_000)]}),
}
LEGAL_HELD_S = 0.03
"""All take under 0.01 s of a quiet core, and up to twice as much beside another process."""


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("name", LEGAL)
async def test_a_mib_that_a_client_sends_holds_nobody_for_10_ms(name: str) -> None:
    kind, value = LEGAL[name]
    body = json.dumps(value).encode()
    assert len(body) <= MIB
    await read_body(body, kind)
    assert min([await held_by(kind, body) for _ in range(3)]) < LEGAL_HELD_S


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("name", WORST)
async def test_a_mib_of_the_worst_holds_nobody_for_long(name: str) -> None:
    assert min([await held_by(*WORST[name]) for _ in range(3)]) < HELD_S


@pytest.mark.parametrize("name", ["sound", "annotations"])
async def test_others_run_while_a_long_body_is_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "SLICE_S", 0.0)
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    running = asyncio.create_task(other())
    kind, body = LONG[name]
    await read_body(body, kind)
    running.cancel()
    assert turns > MANY // 2


@pytest.mark.parametrize(
    ("kind", "large"),
    [
        (SubmitTasks, filled(OF_A_TASK, b"{},", b"{}]}}]}")),
        (SubmitTasks, filled(b'{"policy": "p", "n": 1, "tasks": [], "tags": [', b'"",', b'""]}')),
        (AnnotateLease, filled(OF_A_CALL, b"0,", b"0]}]}", 4 * MIB)),
    ],
)
async def test_what_takes_long_in_one_piece_is_refused(kind: type[RequestBody], large: bytes) -> None:
    with pytest.raises(BodyTooLarge, match="at a time"):
        await read_body(large, kind)
