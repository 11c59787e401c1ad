"""What request bodies have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import core_schema

from rolltap.errors import InvalidRequest

Integer = Annotated[int, Field(ge=-(2**31), lt=2**31)]
"""An integer that a column of every store can hold."""

MAX_TTL_S = 86_400

MAX_ENTRIES = 10_000
"""The most entries of a table in a request."""


class RequestBody:
    """The base of dataclasses that are request bodies.

    Over HTTP, pydantic refuses unknown fields and checks the fields' constraints. `__post_init__` raises
    `InvalidRequest` for what no annotation can say, wherever the object is made.
    """

    __slots__ = ()
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return _first_error(handler(cls))


def _first_error(schema: Any) -> Any:
    """The core schema, except that a list ends with its first refused item, and a table has at most `MAX_ENTRIES`.

    pydantic makes an error for every refused value: half a million of them hold the event loop for seconds.
    """
    if isinstance(schema, list | tuple):
        return type(schema)(map(_first_error, schema))
    if not isinstance(schema, dict):
        return schema
    schema = {name: value if name == "metadata" else _first_error(value) for name, value in schema.items()}
    if schema.get("type") in ("list", "tuple", "set", "frozenset"):
        schema["fail_fast"] = True
    if schema.get("type") == "dict":
        return core_schema.no_info_before_validator_function(_check_entries, schema)
    return schema


def _check_entries(table: Any) -> Any:
    if isinstance(table, Mapping) and len(table) > MAX_ENTRIES:
        raise ValueError(f"{len(table):,} entries are more than {MAX_ENTRIES:,}")
    return table


def values_of(body: Any) -> Mapping[str, Any]:
    """The fields of a body that say something: None stands for every optional field's absence."""
    values = {item.name: getattr(body, item.name) for item in fields(body)}
    return {name: value for name, value in values.items() if value is not None}


def check_ttl(ttl: float) -> None:
    """`InvalidRequest` unless `ttl` is over 0 and at most a day, in seconds."""
    if not 0 < ttl <= MAX_TTL_S:
        raise InvalidRequest(f"ttl is over 0 and at most {MAX_TTL_S} seconds, not {ttl}", param="ttl")
