"""Imports traces of other tools as conversations in OpenAI's chat form: message logs and ATIF documents.

Pure functions from text to `Trace`s. Token ids in a trace are not imported, as their engine is not known. What a reader
does not know is named, once for each name: `Trace.unread`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import takewhile
from typing import Any

from rolltap.errors import DatasetError
from rolltap.wording import is_moment


@dataclass(frozen=True, slots=True)
class ReplyFacts:
    """What a trace says of the call behind a reply. `created_at` in seconds since 1970; None, "" or no count: nothing.

    `usage`: token counts, by the names of the record (`prompt`, `output`, `cached`).
    """

    created_at: float | None = None
    model: str = ""
    usage: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Trace:
    """One conversation. `created_at` is None if the trace has no time. `id` is the trace's own; "": it has none.

    The first `opening` messages were not sampled. `context`: the replies (indices of `messages`) that the trace says
    are no targets. `facts`: what it says of the calls of replies, by the same indices. `unread`: keys of the document
    and its messages that no reader knows. `place`: its file and line, for messages.
    """

    name: str
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    created_at: float | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    id: str = ""
    opening: int = 0
    context: frozenset[int] = frozenset()
    facts: Mapping[int, ReplyFacts] = field(default_factory=dict)
    unread: frozenset[str] = frozenset()
    place: str = ""


DEEPEST = 128
"""Levels of a document. A request of an agent has 64, and stands a few deep in a trace."""

CHAT_KEYS = {"role", "content", "name", "tool_calls", "tool_call_id", "refusal", "reasoning", "reasoning_content"}
OWN_FORMS = {"thinking", "reasoning_details", "weight", "loss", "annotations"}
"""Keys that are read here and no part of the chat form. `annotations` are OpenAI's links to sources."""

MESSAGE_KEYS = CHAT_KEYS | OWN_FORMS | {"function_call", "audio"}
"""The keys of a message that are read, or refused by name."""

THOUGHTS = ("reasoning_content", "reasoning", "thinking", "reasoning_details")
"""The keys of a reply's thinking. The first that holds any counts."""

PART_KEYS = {"type", "text", "refusal", "image_url", "input_audio", "audio_url", "video_url", "file"}
CALL_KEYS, TOOL_KEYS = {"id", "type", "index", "function"}, {"type", "function"}
FUNCTION_KEYS, SCHEMA_KEYS = {"name", "arguments"}, {"name", "description", "parameters"}
"""The keys of a content part, a tool call, a tool, and of the function in either that are read or refused by name."""

GROUP_TAG = "group_id"
"""The tag of an imported session with the group of its row; `--group-by tag.group_id` groups by it."""

VERSION_TAG = "agent_version"
"""The tag of an imported session with the version of its harness."""

SIDES = ("chosen", "rejected")
LABELS = {"session_id", "rollout_id", "task_id"}
SIDES_KEYS = {f"{name}{side}" for side in SIDES for name in ("", "reward_", "rollout_", "session_")}
DOCUMENT_KEYS = {"messages", "prompt", "completion", "label", "tools", "id", "reward", "group_id", "tags"} | LABELS
"""The keys of a line of a message log, and of the rows of our own exports. `LABELS` name what another record holds."""


ATIF_KEYS = {
    "schema_version", "session_id", "trajectory_id", "agent", "steps", "notes", "final_metrics", "extra",
    "continued_trajectory_ref",
}  # fmt: skip
ATIF_STEP_KEYS = {
    "step_id", "timestamp", "source", "model_name", "reasoning_effort", "message", "reasoning_content", "tool_calls",
    "observation", "metrics", "is_copied_context", "llm_call_count", "extra",
}  # fmt: skip
ATIF_CALL_KEYS = {"tool_call_id", "function_name", "arguments", "extra"}
ATIF_RESULT_KEYS = {"source_call_id", "content", "extra"}
"""The keys of an ATIF document, its steps, calls and results that are read, or that say nothing of the conversation."""

UNKNOWN_CALL = "tool_call_id"
"""The key in the `extra` of an ATIF result of ours, with the id of a call that its step did not make."""

ATIF_USAGE = {"prompt_tokens": "prompt", "completion_tokens": "output", "cached_tokens": "cached"}
"""The counts in an ATIF step's metrics, and their names in the record."""


def read_messages(document: Mapping[str, Any], name: str) -> Iterator[Trace]:
    """Reads a line of an OpenAI-style log: `messages`; optionally `tools` (or JSON text), `id`, `reward`, `tags`.

    Also the rows of `sft`, `kto` and `preference`: `prompt` and `completion`, whose replies are the only targets, with
    a `label` or a `reward`; `prompt`, `chosen` and `rejected`, a trace for each side. A reply with `weight` 0 or `loss`
    false is no target. `group_id` becomes a tag; a pair without one is a group of its own.
    """
    if isinstance(document.get("messages"), list) or not all(isinstance(document.get(side), list) for side in SIDES):
        yield _conversation(document, name, frozenset(document.keys() - DOCUMENT_KEYS))
        return
    chosen, rejected = (document[side] for side in SIDES)
    shared = document.get("prompt")
    if shared is None:  # TRL's other form: both sides are whole conversations
        shared = [one for one, _ in takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False))]
        chosen, rejected = chosen[len(shared) :], rejected[len(shared) :]
    digest = hashlib.sha256(json.dumps([shared, chosen, rejected], sort_keys=True).encode()).hexdigest()[:20]
    common = {key: document[key] for key in ("tools", "tags") if key in document}
    unread = frozenset(document.keys() - DOCUMENT_KEYS - SIDES_KEYS)
    for side, completion, earned in (("chosen", chosen, 1), ("rejected", rejected, 0)):
        reward = document.get(f"reward_{side}")
        row = {
            **common,
            "prompt": shared,
            "completion": completion,
            "reward": earned if reward is None else reward,
            "group_id": _name(document.get("group_id")) or digest,
            "id": f"{own}-{side}" if (own := _name(document.get("id"))) else None,
        }
        yield _conversation(row, name, unread)


def _conversation(document: Mapping[str, Any], name: str, unread: frozenset[str]) -> Trace:
    messages, opening = document.get("messages"), 0
    if messages is None and isinstance(document.get("prompt"), list) and isinstance(document.get("completion"), list):
        messages, opening = [*document["prompt"], *document["completion"]], len(document["prompt"])
    if not isinstance(messages, list) or not messages:
        raise DatasetError(f"{name}: messages: expected a list of chat messages")
    tools = document.get("tools") or []
    if isinstance(tools, str):
        tools = _json(tools, f"{name}: tools")
    tags = {str(key): str(value) for key, value in (document.get("tags") or {}).items()}
    if document.get("reward") is not None:
        tags["reward"] = _number(document["reward"])
    elif document.get("label") is not None:
        tags["reward"] = str(_flag(document["label"], "label"))
    if group := _name(document.get("group_id")):
        tags[GROUP_TAG] = group
    own = _name(document.get("id"))
    plain = [_message(message, name) for message in messages]
    return Trace(
        own or name,
        plain,
        tools,
        tags=tags,
        id=own,
        opening=opening,
        context=frozenset(place for place, message in enumerate(messages) if _is_context(message)),
        unread=frozenset({*map(str, unread), *_unread(messages, plain, tools)}),
    )


def _unread(
    messages: Sequence[Mapping[str, Any]], plain: Sequence[Mapping[str, Any]], tools: Sequence[Any]
) -> Iterator[str]:
    """What no reader knows in messages and tools, and thinking that `plain`, the messages as read, does not have."""
    for message, read in zip(messages, plain, strict=True):
        yield from _others(message, MESSAGE_KEYS, "a message")
        thinking = read.get("reasoning_content") or read.get("reasoning") or ""
        for key in THOUGHTS:
            text = _text(message.get(key))
            if message.get(key) and (message["role"] != "assistant" or not text or text != thinking):
                yield f"{key} of a message"
        for part in content if isinstance(content := message.get("content"), list) else ():
            yield from _others(part, PART_KEYS, "a content part")
        for call in message.get("tool_calls") or ():
            yield from _others(call, CALL_KEYS, "a tool call")
            yield from _others(call.get("function"), FUNCTION_KEYS, "a tool call's function")
    for tool in tools:
        yield from _others(tool, TOOL_KEYS, "a tool")
        yield from _others(tool.get("function"), SCHEMA_KEYS, "a tool's function")


def _others(value: Any, known: set[str], of: str) -> Iterator[str]:
    """The keys of an object, `of` what, that are not known and hold something."""
    if isinstance(value, Mapping):
        yield from (f"{key} of {of}" for key, held in value.items() if key not in known and held is not None)


def _is_context(message: Mapping[str, Any]) -> bool:
    """Whether the message is marked as no target, as OpenAI's fine-tuning, our own `sft` and ms-swift do."""
    return any(message.get(key) is not None and not _flag(message[key], key) for key in ("weight", "loss"))


def _flag(value: Any, key: str) -> int:
    """0 or 1. A part of a weight, or a word for one, would be lost without a word: it is refused."""
    if not isinstance(value, int | float) or value not in (0, 1):
        raise ValueError(f"{key}: {str(value)[:80]!r} is neither 0 nor 1, nor false or true")
    return int(value)


def read_atif(document: Mapping[str, Any], name: str) -> Iterator[Trace]:
    """Reads an ATIF document of any 1.x version, without its embedded subagents, which are named as not read.

    Replies of copied context are no targets: another document holds them. Nor are steps that no model sampled.
    """
    if not str(document.get("schema_version", "")).startswith("ATIF-v1."):
        raise DatasetError(f"{name}: schema_version: expected ATIF-v1.x, not {document.get('schema_version')!r}")
    agent = document.get("agent") or {}
    messages: list[dict[str, Any]] = []
    copied: set[int] = set()
    facts: dict[int, ReplyFacts] = {}
    unread = set(document.keys() - ATIF_KEYS)
    for step in document.get("steps") or ():
        if step.get("is_copied_context") or step.get("llm_call_count") == 0:
            copied.add(len(messages))
        if step["source"] == "agent":
            facts[len(messages)] = _facts(step, agent, name)
        messages += _atif_step(step)
        unread.update(_unread_of_step(step))
    if not messages:
        raise DatasetError(f"{name}: steps: expected at least one step")
    stamps = [step["timestamp"] for step in document["steps"] if step.get("timestamp")]
    started = _moment(stamps[0], f"{name}: steps: timestamp") if stamps else None
    tags = {tag: str(agent[key]) for tag, key in (("harness", "name"), (VERSION_TAG, "version")) if agent.get(key)}
    extra = document.get("extra") or {}
    if extra.get("reward") is not None:
        tags["reward"] = _number(extra["reward"])
    if group := _name(extra.get("group_id")):
        tags[GROUP_TAG] = group
    own = _name(document.get("trajectory_id")) or _name(document.get("session_id"))
    yield Trace(
        own or name,
        messages,
        agent.get("tool_definitions") or (),
        started,
        tags,
        own,
        context=frozenset(copied),
        facts=facts,
        unread=frozenset(map(str, unread)),
    )


def _facts(step: Mapping[str, Any], agent: Mapping[str, Any], name: str) -> ReplyFacts:
    metrics = step.get("metrics") or {}
    at = step.get("timestamp")
    return ReplyFacts(
        _moment(at, f"{name}: steps: timestamp") if at else None,
        str(step.get("model_name") or agent.get("model_name") or ""),
        {own: _count(metrics[key], key) for key, own in ATIF_USAGE.items() if metrics.get(key) is not None},
    )


Reader = Callable[[Mapping[str, Any], str], Iterator[Trace]]
READERS: Mapping[str, Reader] = {"messages": read_messages, "atif": read_atif}


def read_traces(format: str, text: str, name: str) -> Iterator[Trace]:
    """Reads the traces of a file: JSON Lines, one JSON document, or a JSON list. Errors name the file and line."""
    if format not in READERS:
        raise DatasetError(f"no trace format {format!r}; known: {', '.join(sorted(READERS))}")
    for place, document in _documents(text, name):
        if not isinstance(document, Mapping):
            raise DatasetError(f"{place}: expected a JSON object, not {type(document).__name__}")
        try:
            yield from (replace(trace, place=place) for trace in READERS[format](document, place))
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise DatasetError(f"{place}: not a trace of format {format}: {error!r}") from error
        except RecursionError:
            raise DatasetError(f"{place}: the JSON is nested too deeply") from None


def _number(value: Any) -> str:
    """A finite number in the fewest digits that mean it exactly."""
    if isinstance(value, bool) or not math.isfinite(number := float(value)):
        raise ValueError(f"reward: {value!r} is not a finite number")
    return repr(number).removesuffix(".0")


def _name(value: Any) -> str:
    """An id as text: also 0, the first one of many files. "" without one."""
    return "" if value is None else str(value)


def _count(value: Any, key: str) -> int:
    if isinstance(value, bool | str) or not 0 <= value < 2**31 or value != int(value):
        raise ValueError(f"{key}: {value!r} is not a number of tokens")
    return int(value)


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
        value = json.loads(text, object_pairs_hook=_each_once)
    except ValueError as error:
        raise DatasetError(f"{where}: not valid JSON: {error}") from None
    except RecursionError:
        raise DatasetError(f"{where}: the JSON is nested too deeply") from None
    level = [value]
    for _ in range(DEEPEST):  # what Python itself takes depends on its version, and on who asks
        level = [
            child
            for parent in level
            if isinstance(parent, dict | list)
            for child in (parent.values() if isinstance(parent, dict) else parent)
        ]
        if not level:
            return value
    raise DatasetError(f"{where}: the JSON is nested too deeply: {DEEPEST} levels are taken")


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object. Of a name that is there twice, one value would be lost without a word: it is refused."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"{twice[:80]!r} is there twice in an object")
    return found


def _message(message: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A chat message in wire form, with arguments as text."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise DatasetError(f"{name}: messages: expected objects with a role")
    plain = {key: value for key, value in message.items() if value is not None and key not in OWN_FORMS}
    if message["role"] == "assistant" and not (plain.get("reasoning_content") or plain.get("reasoning")):
        plain |= next(({"reasoning_content": text} for key in THOUGHTS if (text := _text(message.get(key)))), {})
    if "tool_calls" in plain:
        plain["tool_calls"] = [_wire_call(call) for call in plain["tool_calls"]]
    return plain


def _text(thinking: Any) -> str:
    """The text of a reply's thinking: a text, a block that holds one (of `reasoning_details`), or a list of these."""
    if isinstance(thinking, list):
        return "".join(map(_text, thinking))
    if isinstance(thinking, Mapping):
        return next((text for name in ("text", "thinking", "summary") if (text := _text(thinking.get(name)))), "")
    return thinking if isinstance(thinking, str) else ""


def _wire_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    if not isinstance(function.get("arguments"), str):
        function["arguments"] = json.dumps(function.get("arguments") or {}, ensure_ascii=False)
    return {**call, "type": "function", "function": function}


def _unread_of_step(step: Mapping[str, Any]) -> Iterator[str]:
    yield from _others(step, ATIF_STEP_KEYS, "a step")
    for call in step.get("tool_calls") or ():
        yield from _others(call, ATIF_CALL_KEYS, "a tool call")
    observation = step.get("observation") or {}
    yield from _others(observation, {"results"}, "an observation")
    for result in observation.get("results") or ():
        yield from _others(result, ATIF_RESULT_KEYS, "a result")


def _atif_step(step: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The messages of a step: its message, then the results of its tool calls."""
    results = (step.get("observation") or {}).get("results") or []
    if step["source"] != "agent":
        if not step.get("message") and results and all(map(_unknown_call, results)):
            yield from (_tool_message(_unknown_call(result), result) for result in results)
            return
        texts = [_atif_text(step.get("message")), *(_atif_text(result.get("content")) for result in results)]
        yield {"role": "system" if step["source"] == "system" else "user", "content": "\n".join(filter(None, texts))}
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
        source = result.get("source_call_id")
        if call_id := source if source in called else _unknown_call(result):
            yield _tool_message(call_id, result)
        else:
            yield {"role": "user", "content": _atif_text(result.get("content"))}


def _unknown_call(result: Mapping[str, Any]) -> str:
    """The id of a call that the result's step did not make, as our exports have it; "" without one."""
    return str((result.get("extra") or {}).get(UNKNOWN_CALL) or "")


def _tool_message(call_id: str, result: Mapping[str, Any]) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": _atif_text(result.get("content"))}


def _atif_text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part["text"] if part["type"] == "text" else f"<{part['type']}>" for part in content)
