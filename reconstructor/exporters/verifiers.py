"""verifiers' saved runs (`traces.jsonl`): one episode per line, with one trace: the message graph prime-rl trains on.

Each segment with loss is a path of its own through the graph, from a root. A token in several segments has a mask of
True in only one of them. A message that was not sampled has no tokens, as with those clients of verifiers that can't
tell which tokens belong to it: the prompt's tokens are in the node of the next sampled reply, with a mask of False.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rolltap.reconstructor.exporters.base import (
    Container,
    ExportItem,
    Message,
    Row,
    SkippedItem,
    last_span,
    texts_behind,
    trained_whole,
)
from rolltap.reconstructor.exporters.conversation import as_text, content_text, recorded_messages
from rolltap.types import CallSpan, Finish, RolloutStatus, Segment

VERIFIERS = "0.4.0"
"""The release whose schema the rows follow."""

FINISHES = {Finish.STOP: "stop", Finish.LENGTH: "length", Finish.TOOL_CALLS: "tool_calls"}


@dataclass(frozen=True, slots=True)
class Verifiers:
    """One row per session. `env` is the environment's name in the episodes."""

    env: str = "rolltap"

    name: ClassVar[str] = "verifiers"
    containers: ClassVar[tuple[Container, ...]] = ("jsonl",)
    faithful: ClassVar[bool] = True
    for_training: ClassVar[bool] = True

    def schema(self) -> Mapping[str, str]:
        return {}

    def rows(self, group: Sequence[ExportItem]) -> Iterable[Row | SkippedItem]:
        for item in group:
            graph = _Graph(item)
            for segment in item.rows:
                if not graph.add(segment):
                    yield SkippedItem("a segment whose messages are not on record")
            if graph.nodes:
                calls = [turn.call_id for segment in item.rows for turn in segment.turns]
                yield Row(self._episode(item, graph), texts=texts_behind(item, calls))
            elif not item.rows:
                yield SkippedItem("no tokens that may be trained")

    def _episode(self, item: ExportItem, graph: _Graph) -> dict[str, Any]:
        status = item.rollout.status if item.rollout is not None else RolloutStatus.SUCCEEDED
        prompt = item.task.instruction if item.task is not None else None
        task = {"type": "Task", "data": {"id": item.task_id, "prompt": prompt}, "key": item.task_id}
        ended = {
            "ok": status in (RolloutStatus.SUCCEEDED, RolloutStatus.TIMED_OUT),
            "is_timeout": status is RolloutStatus.TIMED_OUT,
        }
        trace: dict[str, Any] = {
            "version": 1,
            "id": item.session.id,
            "verifiers": {"version": VERIFIERS},
            "task": task,
            "agent": {"config": {"model": item.session.policy}, "name": "agent", "trainable": True},
            "tools": graph.nodes[0].get("tools", []),
            "nodes": graph.nodes,
            "calls": graph.calls,
            "rewards": {} if item.reward is None else {"reward": {"score": item.reward}},
            "info": {"rolltap": {**item.labels(), "harness": item.harness, "weight_versions": graph.versions}},
            "is_completed": True,
            "timing": {"start": item.session.created_at},
            **ended,
        }
        group = {} if item.group_id is None else {"group": {"id": item.group_id}}
        return {"id": item.session.id, "env": {"id": self.env}, "task": task, "traces": [trace], **group, **ended}


class _Graph:
    """A trace's nodes and calls. `versions` has [version, start, end] of the sampled tokens, for each of `calls`."""

    def __init__(self, item: ExportItem) -> None:
        self._item = item
        self.nodes: list[dict[str, Any]] = []
        self.calls: list[dict[str, Any]] = []
        self.versions: list[list[list[int]]] = []

    def add(self, segment: Segment) -> bool:
        """Adds a path for a segment, up to its last trained reply. Returns False if one of its calls has no text."""
        item, last = self._item, last_span(segment)
        turns = [turn for turn in segment.turns if turn.end <= last.end]
        recorded = recorded_messages(item, [(turn.call_id, trained_whole(segment, turn)) for turn in turns])
        if recorded is None:
            return False
        by_call = {turn.call_id: turn for turn in turns}
        parent, begin, time = None, 0, item.session.created_at
        for each in recorded:
            node: dict[str, Any] = {"parent": parent, "message": _message(each.message), "timestamp": time}
            if parent is None:
                node["tools"] = [_tool(tool) for tool in item.texts[turns[0].call_id].tools]
            parent = len(self.nodes)
            if each.call_id is not None:
                turn = by_call[each.call_id]
                mask = segment.loss_mask[begin : turn.end]
                node |= {
                    "sampled": True,
                    "token_ids": segment.token_ids[begin : turn.end],
                    "mask": mask,
                    "logprobs": segment.logprobs[begin : turn.end][mask],
                }
                begin, time = turn.end, self._call(turn, parent)
            self.nodes.append(node)
        return True

    def _call(self, turn: CallSpan, node: int) -> float:
        """Adds the call that sampled a node. Returns the time at which it ended."""
        call, text = self._item.calls[turn.call_id], self._item.texts[turn.call_id]
        end = text.finished_at or text.created_at
        self.calls.append(
            {
                "node": node,
                "model": call.policy,
                "sampling": text.sampled_at,
                "finish_reason": FINISHES.get(call.finish),
                "usage": {"prompt_tokens": len(call.prompt_ids), "completion_tokens": len(call.output_ids)},
                "time": {"start": text.created_at, "end": end},
            }
        )
        self.versions.append([[span.version, span.start, span.end] for span in call.versions])
        return end


def _message(message: Message) -> dict[str, Any]:
    """A message in verifiers' form: one of four roles, and a tool call's arguments as a text."""
    role = {"developer": "system"}.get(message["role"], message["role"])
    if role == "assistant":
        calls = [_call(call) for call in message.get("tool_calls") or ()]
        reasoning = message.get("reasoning_content")
        return {"role": role, "content": content_text(message), "reasoning_content": reasoning, "tool_calls": calls}
    fields = {"role": role, "content": message.get("content") or ""}
    return {**fields, "tool_call_id": message.get("tool_call_id", "")} if role == "tool" else fields


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = as_text(call["function"])
    return {"id": call["id"], "name": function["name"], "arguments": function["arguments"]}


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool.get("function", tool)
    kept = {key: function[key] for key in ("name", "description", "parameters", "strict") if key in function}
    return {"type": tool.get("type", "function"), **kept}
