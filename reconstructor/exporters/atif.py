"""ATIF, the Agent Trajectory Interchange Format, v1.7: one document per line, validated by the published models.

A document is a segment with loss as its harness saw it: system and user messages, and one agent step per call with its
tool calls, their observations, and the tokens and log-probabilities in `metrics`. A session without tokens (imported,
or of a closed model) has a document for each conversation; its `metrics` are the recorded counts, if there are any.
Subagents' documents are embedded in the session's first one and listed in its `notes`. If the main agent has several,
each document refers to the next one (`continued_trajectory_ref`). Steps that another document trains are marked
`is_copied_context`. ATIF has no field for a reward: it is in the root's `extra`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any, ClassVar

from rolltap.reconstructor.exporters.base import (
    Container,
    ExportItem,
    Message,
    Row,
    SkippedItem,
    trained_whole,
)
from rolltap.reconstructor.exporters.conversation import (
    SHOWS_IMAGES,
    Conversation,
    RecordedMessage,
    conversations,
    recorded_messages,
)
from rolltap.reconstructor.exporters.transitions import versions_of
from rolltap.reconstructor.importers import ATIF_USAGE, UNKNOWN_CALL, VERSION_TAG
from rolltap.types import Call, CallKind

SCHEMA_VERSION = "ATIF-v1.7"


@dataclass(frozen=True, slots=True)
class Atif:
    """`agent_version` is the harness version written to the documents; "": that of the trace, if it was imported."""

    agent_version: str = ""

    name: ClassVar[str] = "atif"
    containers: ClassVar[tuple[Container, ...]] = ("jsonl",)
    faithful: ClassVar[bool] = True
    for_training: ClassVar[bool] = True

    def schema(self) -> Mapping[str, str]:
        return {}

    def rows(self, group: Sequence[ExportItem]) -> Iterable[Row | SkippedItem]:
        for item in group:
            has_tokens = bool(item.trajectory.segments)
            found = list(_of_segments(item) if has_tokens else conversations(item))
            if not found:
                yield SkippedItem(f"no {'tokens' if has_tokens else 'conversation'} that may be trained")
                continue
            if not has_tokens and any(conversation.image_urls for conversation in found):
                yield SHOWS_IMAGES
                continue
            first_agent = "" if any(not conversation.agent for conversation in found) else found[0].agent
            main = [conversation for conversation in found if conversation.agent == first_agent]
            others = [conversation for conversation in found if conversation.agent != first_agent]
            documents = [self._document(item, conversation, f"{index}") for index, conversation in enumerate(main)]
            for document, following in pairwise(documents):
                document["continued_trajectory_ref"] = following["trajectory_id"]
            if others:
                documents[0]["subagent_trajectories"] = [
                    self._document(item, conversation, f"sub-{index}") for index, conversation in enumerate(others)
                ]
                documents[0]["notes"] = "subagent_trajectories: " + ", ".join(
                    conversation.agent for conversation in others
                )
            for document in documents:
                yield Row(document, texts=[document] if has_tokens else ())

    def _document(self, item: ExportItem, conversation: Conversation, suffix: str) -> dict[str, Any]:
        steps = [{"step_id": number, **step} for number, step in enumerate(_steps(item, conversation), 1)]
        kind = conversation.segment.kind if conversation.segment is not None else CallKind.MAIN
        called = [step for step in steps if "llm_call_count" in step]
        counted = [step.get("metrics", {}) for step in called if not step.get("is_copied_context")]
        agent: dict[str, Any] = {
            "name": item.harness or "unknown",
            "version": self.agent_version or item.session.tags.get(VERSION_TAG, "unknown"),
        }
        models = [step.get("model_name") for step in called]
        if conversation.segment is not None:
            agent["model_name"] = item.session.policy
        elif all(models):  # ATIF's default for steps without a name
            agent["model_name"] = models[0]
        if conversation.tools:
            agent["tool_definitions"] = list(conversation.tools)
        return {
            "schema_version": SCHEMA_VERSION,
            "session_id": item.session.id,
            "trajectory_id": f"{item.session.id}-{suffix}",
            "agent": agent,
            "steps": steps,
            "final_metrics": {
                **{
                    f"total_{name}": sum(metrics.get(name, 0) for metrics in counted)
                    for name in ATIF_USAGE
                    if conversation.segment is not None or any(name in metrics for metrics in counted)
                },
                "total_steps": len(steps),
            },
            "extra": {**item.labels(), "agent": conversation.agent, "kind": kind.value},
        }


def _of_segments(item: ExportItem) -> Iterable[Conversation]:
    """The whole conversation of each segment with loss whose messages are on record."""
    for segment in item.rows:
        recorded = recorded_messages(item, [(turn.call_id, trained_whole(segment, turn)) for turn in segment.turns])
        if recorded is not None:
            tools = item.texts[segment.turns[-1].call_id].tools
            yield Conversation(recorded, tools, segment, segment.agent)


def _steps(item: ExportItem, conversation: Conversation) -> list[dict[str, Any]]:
    """The conversation's steps without their ids. A tool's result is in the step that called it."""
    agent: dict[str, Any] | None = None
    callers: dict[str, dict[str, Any]] = {}  # by tool-call id: the last step that has it
    steps: list[dict[str, Any]] = []
    for entry in conversation.recorded:
        message = entry.message
        if message["role"] == "tool" and agent is not None:
            caller = callers.get(message.get("tool_call_id", ""), agent)
            known = {call["tool_call_id"] for call in caller.get("tool_calls", ())}
            caller.setdefault("observation", {"results": []})["results"].append(_result(message, known))
            continue
        if entry.call_id is None:
            step = _message_step(message)
        else:
            step = _agent_step(item, entry.call_id, entry, has_tokens=conversation.segment is not None)
        steps.append(step)
        if message["role"] == "assistant":
            agent = step
            callers.update((call["tool_call_id"], step) for call in step.get("tool_calls", ()))
    return steps


def _message_step(message: Message) -> dict[str, Any]:
    """A step for a message that no call of this segment sampled. An assistant message becomes copied context."""
    if message["role"] == "assistant":
        return {"source": "agent", "is_copied_context": True, **_reply_fields(message)}
    if message["role"] == "tool":
        return {"source": "system", "message": "", "observation": {"results": [_result(message, ())]}}
    return {"source": "system" if message["role"] == "system" else "user", "message": _content(message)}


def _agent_step(item: ExportItem, call_id: str, reply: RecordedMessage, *, has_tokens: bool) -> dict[str, Any]:
    call, text = item.calls[call_id], item.texts[call_id]
    if has_tokens:
        model, metrics = call.policy, _token_metrics(call, reply.train)
    else:
        model = text.sampling.get("model")
        metrics = {name: text.usage[own] for name, own in ATIF_USAGE.items() if own in text.usage}
    step: dict[str, Any] = {
        "source": "agent",
        "timestamp": datetime.fromtimestamp(text.created_at, UTC).isoformat(),
        **({"model_name": model} if model else {}),
        **_reply_fields(reply.message),
        **({"metrics": metrics} if metrics else {}),
        "llm_call_count": 1,
    }
    return step if reply.train else {**step, "is_copied_context": True}


def _token_metrics(call: Call, trained: bool) -> dict[str, Any]:
    metrics: dict[str, Any] = {
        "prompt_tokens": len(call.prompt_ids),
        "completion_tokens": len(call.output_ids),
        "cached_tokens": call.shared,
        "prompt_token_ids": call.prompt_ids,
        "completion_token_ids": call.output_ids,
        "extra": {"call_id": call.id, "finish": call.finish.value, "trained": trained},
    }
    if len(call.logprobs) == len(call.output_ids):
        metrics["logprobs"] = call.logprobs
        metrics["extra"]["weight_versions"] = versions_of(call)
    return metrics


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


def _result(message: Message, known: Collection[str]) -> dict[str, Any]:
    """A tool's result. ATIF has no place for the id of a call that its step did not make: it is in `extra`."""
    result: dict[str, Any] = {"content": _content(message)}
    call_id = message.get("tool_call_id")
    if call_id in known:
        result["source_call_id"] = call_id
    elif call_id:
        result["extra"] = {UNKNOWN_CALL: call_id}
    return result


def _content(message: Message) -> str | list[dict[str, Any]]:
    content = message.get("content") or ""
    return content if isinstance(content, str) else [_part(part) for part in content]


def _part(part: Mapping[str, Any]) -> dict[str, Any]:
    if part["type"] == "text":
        return {"type": "text", "text": part["text"]}
    url: str = part["image_url"]["url"]
    media = url[5:].partition(";")[0] if url.startswith("data:") else "image/png"
    return {"type": "image", "source": {"media_type": media.replace("image/jpg", "image/jpeg"), "path": url}}
