"""A seeded mutator of JSON: what a client with a bug might send instead of a sound request."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

HUGE: tuple[Any, ...] = (10**30, -(2**63), 1e308, "x" * 100_000, ["x"] * 2_000, {str(key): key for key in range(2_000)})
WRONG: tuple[Any, ...] = (True, 7, -1, 0.5, "", "nothing", [], {}, [[]], {"type": "nothing"}, "\x00", "data:,")


def mutants(body: dict[str, Any], seed: int, count: int) -> Iterator[dict[str, Any]]:
    """`count` copies of `body`, each changed in one to three places."""
    chance = random.Random(seed)
    for _ in range(count):
        mutant: Any = body
        for _ in range(chance.randint(1, 3)):
            options = list(places(mutant))
            if options:
                mutant = changed(mutant, chance.choice(options), chance)
        yield mutant


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value inside `value`."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in entries:
        yield (*path, key)
        yield from places(inner, (*path, key))


def changed(value: Any, path: tuple[Any, ...], chance: random.Random) -> Any:
    """A copy of `value` with one change at `path`."""
    copy: Any = dict(value) if isinstance(value, dict) else list(value)
    key, *rest = path
    if rest:
        copy[key] = changed(copy[key], tuple(rest), chance)
        return copy
    match chance.choice(["drop", "null", "wrong", "huge", "duplicate", "reorder"]):
        case "drop":
            del copy[key]
        case "null":
            copy[key] = None
        case "wrong":
            copy[key] = chance.choice(WRONG)
        case "huge":
            copy[key] = chance.choice(HUGE)
        case "duplicate" if isinstance(copy, list):
            copy.insert(key, copy[key])
        case "duplicate":
            copy[f"{key}_again"] = copy[key]
        case _:
            copy = _reordered(copy, chance)
    return copy


def _reordered(copy: Any, chance: random.Random) -> Any:
    """The same entries in another order; of an object, the same names with each other's values."""
    if isinstance(copy, list):
        return chance.sample(copy, len(copy))
    return dict(zip(copy, chance.sample(list(copy.values()), len(copy)), strict=True))


def without_images(value: Any) -> Any:
    """The JSON without the parts that hold a picture."""
    if isinstance(value, list):
        return [without_images(entry) for entry in value if not is_image(entry)]
    return {key: without_images(entry) for key, entry in value.items()} if isinstance(value, dict) else value


def is_image(entry: Any) -> bool:
    return isinstance(entry, dict) and (
        entry.get("type") in ("image", "image_url", "input_image") or "inlineData" in entry
    )
