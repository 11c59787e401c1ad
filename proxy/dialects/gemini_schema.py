"""Google's `Schema` (an OpenAPI 3.0 subset with upper-case types) as JSON Schema."""

from __future__ import annotations

from typing import Any

from rolltap.proxy.dialects.gemini_wire import camel_key

_LISTS = ("anyOf", "prefixItems")
_OWN = frozenset({"propertyOrdering", "example", "nullable"})


def json_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """The JSON Schema that means the same. Its depth has been checked."""
    out: dict[str, Any] = {}
    for name, value in schema.items():
        key = camel_key(name)
        if key == "type" and isinstance(value, str):
            out[key] = value.lower()
        elif key == "properties" and isinstance(value, dict):
            out[key] = {field: _inner(item) for field, item in value.items()}
        elif key in _LISTS and isinstance(value, list):
            out[key] = [_inner(item) for item in value]
        elif key in ("items", "additionalProperties"):
            out[key] = _inner(value)
        elif key not in _OWN:
            out[key] = value
    if schema.get("nullable") is True and isinstance(out.get("type"), str):
        out["type"] = [out["type"], "null"]
    return out


def _inner(value: Any) -> Any:
    return json_schema(value) if isinstance(value, dict) else value
