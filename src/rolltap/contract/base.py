"""What request bodies have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field

from rolltap.errors import InvalidRequest

Integer = Annotated[int, Field(ge=-(2**31), lt=2**31)]
"""An integer that a column of every store can hold."""

MAX_TTL_S = 86_400


class RequestBody:
    """The base of dataclasses that are request bodies.

    Over HTTP, pydantic refuses unknown fields and checks the fields' constraints. `__post_init__` raises
    `InvalidRequest` for what no annotation can say, wherever the object is made.
    """

    __slots__ = ()
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")


def values_of(body: Any) -> Mapping[str, Any]:
    """The fields of a body that say something: None stands for every optional field's absence."""
    values = {item.name: getattr(body, item.name) for item in fields(body)}
    return {name: value for name, value in values.items() if value is not None}


def check_ttl(ttl: float) -> None:
    """`InvalidRequest` unless `ttl` is over 0 and at most a day, in seconds."""
    if not 0 < ttl <= MAX_TTL_S:
        raise InvalidRequest(f"ttl is over 0 and at most {MAX_TTL_S} seconds, not {ttl}", param="ttl")
