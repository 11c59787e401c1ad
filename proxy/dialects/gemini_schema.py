"""Converts Google's `Schema` (an OpenAPI 3.0 subset with upper-case types) to JSON Schema."""

from __future__ import annotations

from typing import Any

from rolltap.proxy.dialects.gemini_wire import camel_key

_LISTS = ("anyOf", "prefixItems")
_OWN = frozenset({"propertyOrdering", "example", "nullable"})


def json_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns the equivalent JSON Schema. The caller has checked the depth."""
    converted: dict[str, Any] = {}
    for name, value in schema.items():
        key = camel_key(name)
        if key == "type" and isinstance(value, str):
            converted[key] = value.lower()
        elif key == "properties" and isinstance(value, dict):
            converted[key] = {field: _convert_value(item) for field, item in value.items()}
        elif key in _LISTS and isinstance(value, list):
            converted[key] = [_convert_value(item) for item in value]
        elif key in ("items", "additionalProperties"):
            converted[key] = _convert_value(value)
        elif key not in _OWN:
            converted[key] = value
    if schema.get("nullable") is True and isinstance(converted.get("type"), str):
        converted["type"] = [converted["type"], "null"]
    return converted


def _convert_value(value: Any) -> Any:
    return json_schema(value) if isinstance(value, dict) else value
