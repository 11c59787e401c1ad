"""Imports traces of other tools as conversations in OpenAI's chat form: message logs and ATIF documents.

Pure functions from text to `Trace`s. Token ids in a trace are not imported, as their engine is not known.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from rolltap.errors import DatasetError
from rolltap.moments import is_moment


@dataclass(frozen=True, slots=True)
class Trace:
    """One conversation. `created_at` is None if the trace has no time. `id` is the trace's own; "": it has none.

    `place` is its file and line, for messages.
    """

    name: str
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    created_at: float | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    id: str = ""
    place: str = ""


def read_messages(document: Mapping[str, Any], name: str) -> Trace:
    """Reads a line of an OpenAI-style log: `messages`; optionally `tools` (or JSON text), `id`, `reward`, `tags`."""
    messages = document.get("messages")
    if not isinstance(messages, list) or not messages:
        raise DatasetError(f"{name}: messages: expected a list of chat messages")
    tools = document.get("tools") or []
    if isinstance(tools, str):
        tools = _json(tools, f"{name}: tools")
    tags = {str(key): str(value) for key, value in (document.get("tags") or {}).items()}
    if document.get("reward") is not None:
        tags["reward"] = _number(document["reward"])
    own = str(document.get("id") or "")
    return Trace(own or name, [_message(message, name) for message in messages], tools, None, tags, own)


def read_atif(document: Mapping[str, Any], name: str) -> Trace:
    """Reads an ATIF document of any 1.x version, without its embedded subagents."""
    if not str(document.get("schema_version", "")).startswith("ATIF-v1."):
        raise DatasetError(f"{name}: schema_version: expected ATIF-v1.x, not {document.get('schema_version')!r}")
    agent = document.get("agent") or {}
    messages: list[dict[str, Any]] = []
    for step in document.get("steps") or ():
        messages += _atif_step(step)
    if not messages:
        raise DatasetError(f"{name}: steps: expected at least one step")
    stamps = [step["timestamp"] for step in document["steps"] if step.get("timestamp")]
    started = _moment(stamps[0], f"{name}: steps: timestamp") if stamps else None
    tags = {"harness": str(agent["name"])} if agent.get("name") else {}
    reward = (document.get("extra") or {}).get("reward")
    if reward is not None:
        tags["reward"] = _number(reward)
    own = str(document.get("trajectory_id") or document.get("session_id") or "")
    return Trace(own or name, messages, agent.get("tool_definitions") or (), started, tags, own)


READERS: Mapping[str, Callable[[Mapping[str, Any], str], Trace]] = {"messages": read_messages, "atif": read_atif}


def read_traces(format: str, text: str, name: str) -> Iterator[Trace]:
    """Reads the traces of a file: JSON Lines, one JSON document, or a JSON list. Errors name the file and line."""
    if format not in READERS:
        raise DatasetError(f"no trace format {format!r}; known: {', '.join(sorted(READERS))}")
    for place, document in _documents(text, name):
        if not isinstance(document, Mapping):
            raise DatasetError(f"{place}: expected a JSON object, not {type(document).__name__}")
        try:
            yield replace(READERS[format](document, place), place=place)
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise DatasetError(f"{place}: not a trace of format {format}: {error!r}") from error


def _number(value: Any) -> str:
    """A number in the fewest digits that mean it exactly. Raises `ValueError` for an infinite one."""
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{number} is not a finite number")
    return repr(number).removesuffix(".0")


def _moment(text: str, where: str) -> float:
    try:
        at = datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
    except (ValueError, OverflowError):
        at = -1.0
    if not is_moment(at):
        raise DatasetError(f"{where}: {text[:80]!r} is not a date since 1970")
    return at


def _documents(text: str, name: str) -> Iterator[tuple[str, Any]]:
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if len(lines) > 1 and _is_json(lines[0][1]):
        for number, line in lines:
            yield f"{name}:{number}", _json(line, f"{name}:{number}")
        return
    whole = _json(text, name)
    if isinstance(whole, list):
        yield from ((f"{name}[{index}]", document) for index, document in enumerate(whole))
    else:
        yield name, whole


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise DatasetError(f"{where}: not valid JSON: {error}") from None
    except RecursionError:
        raise DatasetError(f"{where}: the JSON is nested too deeply") from None


def _message(message: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A chat message in wire form, with arguments as text."""
    if not isinstance(message, Mapping) or "role" not in message:
        raise DatasetError(f"{name}: messages: expected objects with a role")
    plain = {key: value for key, value in message.items() if value is not None}
    if "tool_calls" in plain:
        plain["tool_calls"] = [_wire_call(call) for call in plain["tool_calls"]]
    return plain


def _wire_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    if not isinstance(function.get("arguments"), str):
        function["arguments"] = json.dumps(function.get("arguments") or {}, ensure_ascii=False)
    return {**call, "type": "function", "function": function}


def _atif_step(step: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The messages of a step: its message, then the results of its tool calls."""
    results = (step.get("observation") or {}).get("results") or []
    if step["source"] != "agent":
        text = "\n".join([_atif_text(step.get("message")), *(_atif_text(result.get("content")) for result in results)])
        yield {"role": "system" if step["source"] == "system" else "user", "content": text.strip("\n")}
        return
    calls = [
        {"id": call["tool_call_id"], "function": {"name": call["function_name"], "arguments": call["arguments"]}}
        for call in step.get("tool_calls") or ()
    ]
    message: dict[str, Any] = {"role": "assistant", "content": _atif_text(step.get("message"))}
    if step.get("reasoning_content"):
        message["reasoning_content"] = step["reasoning_content"]
    if calls:
        message["tool_calls"] = [_wire_call(call) for call in calls]
    yield message
    called = {call["id"] for call in calls}
    for result in results:
        text = _atif_text(result.get("content"))
        if result.get("source_call_id") in called:
            yield {"role": "tool", "tool_call_id": result["source_call_id"], "content": text}
        else:
            yield {"role": "user", "content": text}


def _atif_text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.get("text") or f"<{part['type']}>" for part in content)
