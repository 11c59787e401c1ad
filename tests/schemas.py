"""Random JSON schemas of the kinds that clients send, each of which some JSON of moderate length satisfies."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema

NAMES = ("a", "name", "city", "päth", "x-y", 'q"t', "n", "🐸")


def schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema; at depth 0 one of an object, as the vendors' clients want it."""
    if depth == 0:
        return _object(rng, 0)
    leaves = (_text, _number, _enum, _flag)
    deep = (_object, _list, _either, _optional)
    return rng.choice(leaves if depth > 2 or rng.random() < 0.6 else deep)(rng, depth)


def check(text: str, wanted: dict[str, Any]) -> None:
    """Raises if `text` is not JSON that satisfies the schema."""
    jsonschema.validate(json.loads(text), wanted)


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randint(1, 3))
    fields = {name: schema(rng, depth + 1) for name in names}
    required = names if rng.random() < 0.7 else rng.sample(names, rng.randint(0, len(names)))
    return {"type": "object", "properties": fields, "required": required, "additionalProperties": False}


def _list(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "array", "items": schema(rng, depth + 1), "minItems": rng.randint(0, 1), "maxItems": 2}


def _either(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [schema(rng, depth + 1) for _ in range(2)]}


def _optional(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [schema(rng, depth + 1), {"type": "null"}]}


def _text(rng: random.Random, depth: int) -> dict[str, Any]:
    return rng.choice(({"maxLength": 6}, {"pattern": "^[a-z]{2,5}-[0-9]$"}, {"minLength": 1, "maxLength": 3})) | {
        "type": "string"
    }


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": rng.randint(-20, 0), "maximum": rng.randint(1, 2000)}


def _enum(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"enum": rng.sample(["left", "ri\nght", 7, None, True, "ünder"], rng.randint(1, 3))}


def _flag(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "boolean"}
