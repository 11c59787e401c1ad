"""ATIF, the Agent Trajectory Interchange Format, v1.7: one document per line, validated by the published models.

A document is a segment with loss as its harness saw it: system and user messages, and one agent step per call with its
tool calls, their observations, and the tokens and log-probabilities in `metrics`. Subagents' segments are embedded in
the session's first document and listed in its `notes`. If the main agent has several segments, each document refers to
the next one (`continued_trajectory_ref`). Steps that another document trains are marked `is_copied_context`. ATIF has
no field for a reward: it is in the root's `extra`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any, ClassVar

from rolltap.reconstructor.exporters.base import (
    Container,
    ExportItem,
    Message,
    Row,
    SkippedItem,
    trained_spans,
    trained_whole,
)
from rolltap.reconstructor.exporters.conversation import RecordedMessage, recorded_messages
from rolltap.reconstructor.exporters.transitions import versions_of
from rolltap.types import CallSpan, Segment

SCHEMA_VERSION = "ATIF-v1.7"


@dataclass(frozen=True, slots=True)
class Atif:
    """`agent_version` is the harness version written to the documents."""

    agent_version: str = "unknown"

    name: ClassVar[str] = "atif"
    containers: ClassVar[tuple[Container, ...]] = ("jsonl",)
    faithful: ClassVar[bool] = True
    for_training: ClassVar[bool] = True

    def schema(self) -> Mapping[str, str]:
        return {}

    def rows(self, group: Sequence[ExportItem]) -> Iterable[Row | SkippedItem]:
        for item in group:
            readable = {
                segment: recorded for segment in item.rows if (recorded := _recorded(item, segment)) is not None
            }
            if not readable:
                yield SkippedItem("no tokens that may be trained")
                continue
            first_agent = "" if any(not segment.agent for segment in readable) else next(iter(readable)).agent
            main = [segment for segment in readable if segment.agent == first_agent]
            others = [segment for segment in readable if segment.agent != first_agent]
            documents = [
                self._document(item, segment, readable[segment], f"{index}") for index, segment in enumerate(main)
            ]
            for document, following in pairwise(documents):
                document["continued_trajectory_ref"] = following["trajectory_id"]
            if others:
                documents[0]["subagent_trajectories"] = [
                    self._document(item, segment, readable[segment], f"sub-{index}")
                    for index, segment in enumerate(others)
                ]
                documents[0]["notes"] = "subagent_trajectories: " + ", ".join(segment.agent for segment in others)
            for document in documents:
                yield Row(document, texts=[document])

    def _document(
        self, item: ExportItem, segment: Segment, recorded: Sequence[RecordedMessage], suffix: str
    ) -> dict[str, Any]:
        last = item.texts[segment.turns[-1].call_id]
        steps = [{"step_id": number, **step} for number, step in enumerate(_steps(item, segment, recorded), 1)]
        calls = [item.calls[turn.call_id] for turn in trained_spans(segment)]
        agent: dict[str, Any] = {
            "name": item.harness or "unknown",
            "version": self.agent_version,
            "model_name": item.session.policy,
        }
        if last.tools:
            agent["tool_definitions"] = list(last.tools)
        return {
            "schema_version": SCHEMA_VERSION,
            "session_id": item.session.id,
            "trajectory_id": f"{item.session.id}-{suffix}",
            "agent": agent,
            "steps": steps,
            "final_metrics": {
                "total_prompt_tokens": sum(len(call.prompt_ids) for call in calls),
                "total_completion_tokens": sum(len(call.output_ids) for call in calls),
                "total_cached_tokens": sum(call.shared for call in calls),
                "total_steps": len(steps),
            },
            "extra": {**item.labels(), "agent": segment.agent, "kind": segment.kind.value},
        }


def _recorded(item: ExportItem, segment: Segment) -> list[RecordedMessage] | None:
    return recorded_messages(item, [(turn.call_id, trained_whole(segment, turn)) for turn in segment.turns])


def _steps(item: ExportItem, segment: Segment, recorded: Sequence[RecordedMessage]) -> list[dict[str, Any]]:
    """The conversation's steps without their ids."""
    turns = {turn.call_id: replace(turn, trained=trained_whole(segment, turn)) for turn in segment.turns}
    agent: dict[str, Any] | None = None
    steps: list[dict[str, Any]] = []
    for entry in recorded:
        message = entry.message
        if message["role"] == "tool" and agent is not None:
            _observe(agent, message)
            continue
        step = _agent_step(item, turns[entry.call_id], message) if entry.call_id is not None else _message_step(message)
        steps.append(step)
        if message["role"] == "assistant":
            agent = step
    return steps


def _message_step(message: Message) -> dict[str, Any]:
    """A step for a message that no call of this segment sampled. An assistant message becomes copied context."""
    if message["role"] == "assistant":
        return {"source": "agent", "is_copied_context": True, **_reply_fields(message)}
    if message["role"] == "tool":
        result = {"content": _content(message)}
        return {"source": "system", "message": "", "observation": {"results": [result]}}
    return {"source": "system" if message["role"] == "system" else "user", "message": _content(message)}


def _agent_step(item: ExportItem, turn: CallSpan, reply: Message) -> dict[str, Any]:
    call = item.calls[turn.call_id]
    metrics: dict[str, Any] = {
        "prompt_tokens": len(call.prompt_ids),
        "completion_tokens": len(call.output_ids),
        "cached_tokens": call.shared,
        "prompt_token_ids": call.prompt_ids,
        "completion_token_ids": call.output_ids,
        "extra": {"call_id": call.id, "finish": call.finish.value, "trained": turn.trained},
    }
    if len(call.logprobs) == len(call.output_ids):
        metrics["logprobs"] = call.logprobs
        metrics["extra"]["weight_versions"] = versions_of(call)
    step: dict[str, Any] = {
        "source": "agent",
        "timestamp": datetime.fromtimestamp(item.texts[turn.call_id].created_at, UTC).isoformat(),
        "model_name": call.policy or None,
        **_reply_fields(reply),
        "metrics": metrics,
        "llm_call_count": 1,
    }
    return step if turn.trained else {**step, "is_copied_context": True}


def _reply_fields(message: Message) -> dict[str, Any]:
    """The fields of an agent step with its text, reasoning and tool calls."""
    step: dict[str, Any] = {"message": _content(message)}
    if message.get("reasoning_content"):
        step["reasoning_content"] = message["reasoning_content"]
    if message.get("tool_calls"):
        step["tool_calls"] = [_tool_call(call) for call in message["tool_calls"]]
    return step


def _tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    return {
        "tool_call_id": call["id"],
        "function_name": call["function"]["name"],
        "arguments": arguments if isinstance(arguments, Mapping) else {"input": arguments},
    }


def _observe(step: dict[str, Any], message: Message) -> None:
    """Adds a tool's result to the agent step that called it."""
    known = {call["tool_call_id"] for call in step.get("tool_calls", ())}
    result: dict[str, Any] = {"content": _content(message)}
    if message.get("tool_call_id") in known:
        result["source_call_id"] = message["tool_call_id"]
    step.setdefault("observation", {"results": []})["results"].append(result)


def _content(message: Message) -> str | list[dict[str, Any]]:
    content = message.get("content") or ""
    return content if isinstance(content, str) else [_part(part) for part in content]


def _part(part: Mapping[str, Any]) -> dict[str, Any]:
    if part["type"] == "text":
        return {"type": "text", "text": part["text"]}
    url: str = part["image_url"]["url"]
    media = url[5:].partition(";")[0] if url.startswith("data:") else "image/png"
    return {"type": "image", "source": {"media_type": media.replace("image/jpg", "image/jpeg"), "path": url}}
