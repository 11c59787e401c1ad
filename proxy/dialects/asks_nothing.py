"""Values with which a field asks for nothing: harnesses send such fields in every call, whatever their names.

`without` takes such a field out of a body, so that the rest is read as if the field were absent.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from rolltap.decoding import from_json
from rolltap.proxy.conversation.chat import MAX_DEPTH

NOTHING_WORDS = frozenset({"off", "none", "null", "false", "no", "disabled", "default"})
"""Texts that ask for nothing, in any case."""

SWITCHES = ("mode", "type", "enabled", "enable", "status")
"""Members that switch their object: if one of them is off, the object asks for nothing, whatever else is in it."""

ON_BY_DEFAULT = frozenset(
    {"add_generation_prompt", "do_sample", "skip_special_tokens", "spaces_between_special_tokens"}
)
"""Fields of model servers whose `false` asks for something."""

OFF_IS_ASKED = frozenset(
    {"tool_choice", "mode", "effort", "reasoning_effort", "thinking", "reasoning", "enable_thinking", "thinking_level"}
)
"""Known fields that can switch something off: only an empty value asks for nothing."""

ASKED_BY_PRESENCE = frozenset({"web_search_options"})
"""Fields that ask for something even if they are an empty object."""

_STEP = re.compile(r"\.?([^.\[\]]+)|\[(\d+)\]")


def asks_nothing(value: Any, depth: int = 0) -> bool:
    """Whether a field with this value asks for nothing: null, false, an empty value, `off`, or only such values."""
    if value is None or value is False:
        return True
    if isinstance(value, str):
        return not value.strip() or value.strip().lower() in NOTHING_WORDS
    if depth == MAX_DEPTH:
        return False
    if isinstance(value, list):
        return all(asks_nothing(item, depth + 1) for item in value)
    if isinstance(value, dict):
        if any(name in value and asks_nothing(value[name], depth + 1) for name in SWITCHES):
            return True
        return all(name not in ON_BY_DEFAULT and asks_nothing(item, depth + 1) for name, item in value.items())
    return False


def without(data: bytes | msgspec.Raw, path: str, member: str | None = None) -> bytes | None:
    """`data` without the field at `path` (such as `a.b[0].c`), or its `member`, if that asks for nothing; else None.

    All other values keep their bytes.
    """
    steps: list[str | int] = [name or int(index) for name, index in _STEP.findall(path)]
    steps += [member] if member is not None else []
    if not steps or not isinstance(steps[-1], str):
        return None
    try:
        return _without(data, steps)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, LookupError):
        return None


def _without(data: bytes | msgspec.Raw, steps: Sequence[str | int]) -> bytes | None:
    step, rest = steps[0], steps[1:]
    if isinstance(step, int):
        items = from_json(data, list[msgspec.Raw])
        inner = _without(items[step], rest)
        if inner is not None:
            items[step] = msgspec.Raw(inner)
        return None if inner is None else msgspec.json.encode(items)
    fields = from_json(data, dict[str, msgspec.Raw])
    if rest:
        inner = _without(fields[step], rest)
        if inner is None:
            return None
        fields[step] = msgspec.Raw(inner)
    else:
        value: Any = from_json(fields[step], object)
        is_empty = value is None or value in ("", [], {})
        is_present = step in ASKED_BY_PRESENCE and isinstance(value, dict)
        asks = step in ON_BY_DEFAULT or step in OFF_IS_ASKED or not asks_nothing(value)
        if is_present or (asks and not is_empty):
            return None
        del fields[step]
    return msgspec.json.encode(fields)
