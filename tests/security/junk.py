"""Requests of every plane and dialect, made from the routes themselves and spoiled by a seeded mutator.

A request is bytes and a plane. Nothing here is drawn but from the seed, so a batch can be made again.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from tests.dialects import DIALECTS

from ..integration.mutator import WRONG, mutants, without_images

GOLDEN = Path(__file__).parents[1] / "golden" / "dialects"
JUNK_IDS = ("nope", "..", "%2e%2e%2f", "a" * 300, "\x00", "0", "-1", "'; --", "\u202e", "[/nope]", "\ud7ff")
WAITING = {"/tasks/{id}/events", "/events"}
"""Streams that go on until something happens."""
DANGEROUS = {"/policies/{name}/begin_update", "/policies/{name}/receive"}
"""For a policy that is served, calls wait by design until the update is over, or the engine connects elsewhere."""
HEADS = (
    b"Content-Encoding: gzip\r\n",
    b"Content-Length: 1\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Host: elsewhere\r\n",
    b"X: \xff\x00\r\n",
    b"Authorization: Bearer junk\r\n",
    b" folded: x\r\n",
    b"X-Session-Id: ../../x\r\n",
    b"A: " + b"a" * 20_000 + b"\r\n",
    b"Upgrade: websocket\r\nConnection: Upgrade\r\n",
)


@dataclass(frozen=True, slots=True)
class Hit:
    """A request, and what it is counted as."""

    plane: str
    kind: str
    data: bytes


@dataclass(frozen=True, slots=True)
class World:
    """What requests of a batch can name: keys by plane, and ids by the name of their parameter."""

    keys: Mapping[str, str]
    ids: Mapping[str, Sequence[str]]


def batch(seed: int, count: int, schemas: Mapping[str, Any], world: World) -> Iterator[Hit]:
    """`count` requests; `schemas` are the OpenAPI descriptions of the trainer and admin planes."""
    chance = random.Random(seed)
    agents = {name: calls(name, chance, count) for name in DIALECTS}
    operations = {plane: list(_operations(schema)) for plane, schema in schemas.items()}
    for _ in range(count):
        if chance.random() < 0.7:
            name = chance.choice(list(agents))
            yield agent_hit(name, next(agents[name]), chance, world)
        else:
            plane = chance.choice(list(operations))
            yield plane_hit(plane, chance.choice(operations[plane]), schemas[plane], chance, world)


def calls(name: str, chance: random.Random, count: int) -> Iterator[Any]:
    """The dialect's golden conversation with and without images, spoiled in one to three places; and a short one."""
    golden = json.loads((GOLDEN / f"conversation.{name}.json").read_text())
    text = without_images(golden)
    items = DIALECTS[name].items_field
    short = {**text, items: text[items][:1]} if isinstance(text.get(items), list) else text
    many = [mutants(body, chance.getrandbits(32), count) for body in (golden, text, short)]
    for source in cycle(many):
        yield next(source)


def agent_hit(name: str, body: Any, chance: random.Random, world: World) -> Hit:
    dialect = DIALECTS[name]
    route = chance.choice(dialect.routes)
    path = dialect.stream_url if chance.random() < 0.2 else route.path.replace(":path", "")
    model = chance.choice(("tiny", "gardener") * 10 + JUNK_IDS)
    path = path.replace("{model}", quote(model, safe="")).replace("{reply}", quote(chance.choice(JUNK_IDS), safe=""))
    if chance.random() < 0.1:
        path = f"/s/{quote(chance.choice((*world.ids['session_id'], *JUNK_IDS)), safe='')}{path}"
    method = route.method if chance.random() < 0.98 else chance.choice(("PUT", "DELETE", "PATCH", "OPTIONS"))
    if "stream" in urlsplit(path).path.lower():
        method = "POST"
    return Hit("agent", name, wire(method, path, body, key_of("agent", chance, world), chance))


def key_of(plane: str, chance: random.Random, world: World) -> str:
    return world.keys[plane] if chance.random() < 0.97 else chance.choice(["junk", "", *world.keys.values()])


def _operations(schema: Any) -> Iterator[tuple[str, str, Any]]:
    for path, methods in schema["paths"].items():
        if path not in WAITING:
            yield from ((method.upper(), path, operation) for method, operation in methods.items())


def plane_hit(plane: str, operation: tuple[str, str, Any], schema: Any, chance: random.Random, world: World) -> Hit:
    method, path, described = operation
    query = []
    for parameter in described.get("parameters", ()):
        name, where = parameter["name"], parameter["in"]
        known = () if path in DANGEROUS else world.ids.get(name, ())
        value = chance.choice((*known, *known, *known, *JUNK_IDS))
        if where == "path":
            path = path.replace(f"{{{name}}}", quote(value, safe=""))
        elif chance.random() < 0.5:
            drawn = instance(parameter.get("schema", {}), schema, chance)
            query.append(f"{name}={quote(str(drawn if chance.random() < 0.7 else value))}")
    body = None
    if content := described.get("requestBody"):
        sound = instance(content["content"]["application/json"]["schema"], schema, chance)
        body = without_waiting(next(mutants(sound, chance.getrandbits(32), 1)) if chance.random() < 0.6 else sound)
    url = path + ("?" + "&".join(query) if query else "")
    return Hit(plane, plane, wire(method, url, body, key_of(plane, chance, world), chance))


def without_waiting(body: Any) -> Any:
    """A long poll waits by design."""
    return {**body, "wait": 0} if isinstance(body, dict) and "wait" in body else body


def instance(schema: Any, whole: Any, chance: random.Random, depth: int = 0) -> Any:
    """A value that `schema` allows, or nearly."""
    if ref := schema.get("$ref"):
        return instance(whole["components"]["schemas"][ref.rpartition("/")[2]], whole, chance, depth + 1)
    if options := schema.get("anyOf") or schema.get("enum"):
        chosen = chance.choice(options)
        return instance(chosen, whole, chance, depth + 1) if isinstance(chosen, dict) else chosen
    match schema.get("type"):
        case "object" if depth < 8:
            wanted = schema.get("required", ())
            drawn = {
                name: instance(each, whole, chance, depth + 1)
                for name, each in schema.get("properties", {}).items()
                if name in wanted or chance.random() < 0.4
            }
            return drawn or ({"main": "tiny"} if chance.random() < 0.5 else {})
        case "array" if depth < 8:
            return [instance(schema.get("items", {}), whole, chance, depth + 1) for _ in range(chance.randint(0, 3))]
        case "integer":
            return chance.choice((0, 1, 1, 2, 4, -1, 2**31, 2**63))
        case "number":
            return chance.choice((0.0, 1.0, 0.5, 60.0, -1.0, 1e9, 1e300))
        case "boolean":
            return chance.random() < 0.5
        case "string":
            return chance.choice(("tiny", "tiny", "rollout", "main", "hello", *JUNK_IDS))
    return chance.choice(WRONG)


def wire(method: str, url: str, body: Any, key: str, chance: random.Random) -> bytes:
    """The request as bytes; of a hundred, five have a spoiled body and two a spoiled head."""
    data = b"" if method in ("GET", "HEAD") or body is None else json.dumps(body).encode()
    if data and chance.random() < 0.05:
        data = _spoiled(data, chance)
    extra = chance.choice(HEADS) + b"Connection: close\r\n" if data and chance.random() < 0.03 else b""
    head = f"{method} {url} HTTP/1.1\r\nHost: 127.0.0.1\r\n".encode("utf-8", "surrogatepass")
    head += b"Authorization: Bearer " + key.encode() + b"\r\n" + extra
    if data:
        head += b"Content-Type: application/json\r\nContent-Length: " + str(len(data)).encode() + b"\r\n"
    return head + b"\r\n" + data


def _spoiled(data: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(data))
    match chance.randrange(4):
        case 0:
            return data[:at]
        case 1:
            return data[:at] + bytes([chance.randrange(256)]) + data[at + 1 :]
        case 2:
            return data[:at] + data[at:][:50] * 20 + data[at:]
        case _:
            return data[:at] + b"\xff\x00" + data[at:]
