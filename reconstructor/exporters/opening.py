"""The opening of a conversation, compared without volatile text: clocks, working directories, billing headers.

Volatile text is ignored in the harness's own text (`system`). It is ignored in the user's messages, too, if both
conversations are known to be of one task. Text that a policy declares as volatile (`policies.NAME.ignore`) is ignored
in all messages but the assistant's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from rolltap.reconstructor.exporters.base import ExportItem, Message
from rolltap.reconstructor.exporters.conversation import Conversation, conversations

_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*"
VOLATILE = tuple(
    re.compile(pattern)
    for pattern in (
        r"x-anthropic-billing-header:[^\n]*",
        r"\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b",
        r"\b\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:Z|[+-]\d\d:?\d\d)?)?",
        r"\b\d{1,2}/\d{1,2}/\d{4}\b",
        r"\b\d{1,2}:\d\d(?::\d\d)?(?:\s?[AaPp]\.?[Mm]\b\.?)?",
        rf"\b(?:{_MONTH} \d{{1,2}}(?:,? \d{{4}})?|\d{{1,2}} {_MONTH}(?: \d{{4}})?)\b",
        r"\b(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day\b|\b(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)\b",
        r"(?<![\w/.:])(?:/[\w.@+~-]+){2,}/?",
    )
)
"""Billing headers, UUIDs, dates, times, names of days, absolute paths."""


def opening_key(item: ExportItem) -> str:
    """A hash of the opening of the session's main conversation; "" unless it has exactly one.

    Only the policy's patterns apply to user messages: a path or a date there may be the task.
    """
    main = [conversation for conversation in conversations(item) if not conversation.agent]
    if len(main) != 1:
        return ""
    data = json.dumps(_beginning(main[0], item, ("system", "developer")), ensure_ascii=False)
    return blake2b(data.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def begin_alike(one: tuple[ExportItem, Conversation], other: tuple[ExportItem, Conversation]) -> bool:
    """True if two conversations of one task begin with the same messages, apart from volatile text."""
    roles = ("system", "developer", "user", "tool")
    return _beginning(one[1], one[0], roles) == _beginning(other[1], other[0], roles)


def _beginning(conversation: Conversation, item: ExportItem, roles: Sequence[str]) -> list[Any]:
    """The opening messages. Those of `roles` are without volatile text."""
    opening = [each.message for each in conversation.recorded[: conversation.opening]]
    return [_steady(message, item.ignore, message["role"] in roles) for message in opening]


def _steady(message: Message, ignore: Sequence[re.Pattern[str]], everything: bool) -> Any:
    patterns = (*ignore, *VOLATILE) if everything else tuple(ignore)
    if message["role"] == "assistant":
        patterns = ()
    content = message.get("content") or ""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    steady = [{**part, "text": _without(part["text"], patterns)} if part["type"] == "text" else part for part in parts]
    role = "system" if message["role"] == "developer" else message["role"]
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return [role, steady, calls]


def _without(text: str, patterns: Sequence[re.Pattern[str]]) -> str:
    for pattern in patterns:
        text = pattern.sub("", text)
    return text
