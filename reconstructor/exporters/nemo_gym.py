"""NeMo Gym's rollouts (`gym eval run`'s JSON Lines): one row per rollout, with items of the Responses API.

The last item of a trained reply has `prompt_token_ids`, `generation_token_ids` and `generation_log_probs`, as Gym's own
model servers write them; NeMo RL trains on these. NeMo RL requires that every prompt begins with the previous prompt
and reply, so a rollout with a break or with subagents has no row.
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
    only_segment,
    stable_number,
    texts_behind,
)
from rolltap.reconstructor.exporters.conversation import Conversation, as_text, content_text, conversations
from rolltap.types import Float32, Int32


@dataclass(frozen=True, slots=True)
class NemoGym:
    """`agent` is the agent by which Gym groups its metrics; "": the rollout's harness."""

    agent: str = ""

    name: ClassVar[str] = "nemo-gym"
    containers: ClassVar[tuple[Container, ...]] = ("jsonl",)
    faithful: ClassVar[bool] = True
    for_training: ClassVar[bool] = True

    def schema(self) -> Mapping[str, str]:
        return {}

    def rows(self, group: Sequence[ExportItem]) -> Iterable[Row | SkippedItem]:
        for index, item in enumerate(group):
            segment = only_segment(item)
            if isinstance(segment, SkippedItem):
                yield segment
            elif item.reward is None:
                yield SkippedItem("no reward")
            elif not (readable := list(conversations(item))):
                yield SkippedItem("a segment whose messages are not on record")
            else:
                values = self._values(item, readable[0], index)
                yield Row(values, texts=texts_behind(item, [turn.call_id for turn in segment.turns]))

    def _values(self, item: ExportItem, conversation: Conversation, index: int) -> dict[str, Any]:
        opening = conversation.opening
        before = conversation.recorded[:opening]
        output: list[dict[str, Any]] = []
        for place, each in enumerate(conversation.recorded[opening:]):
            output += items_of(each.message, str(place))
            if each.train and each.call_id is not None:
                call = item.calls[each.call_id]
                output[-1] |= token_fields(call.prompt_ids, call.output_ids, call.logprobs)
        first = item.texts[next(each.call_id for each in conversation.recorded if each.call_id is not None)]
        asked = [each for message in before for each in items_of(message.message, "in")]
        tools = [_tool(tool) for tool in conversation.tools]
        response = response_of(item.session.id, item.session.policy, output, first.created_at)
        return {
            "_ng_task_index": stable_number(item.group_id or item.session.id),
            "_ng_rollout_index": index,
            "agent_ref": {"name": self.agent or item.harness or "agent"},
            "responses_create_params": {"input": asked, "tools": tools, **first.sampled_at},
            "response": {**response, "tools": tools},
            **item.labels(),
        }


def response_of(session_id: str, model: str, output: Sequence[Mapping[str, Any]], created_at: float) -> dict[str, Any]:
    """A session as a response of the Responses API."""
    return {
        "id": f"resp_{session_id}",
        "created_at": created_at,
        "model": model,
        "object": "response",
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
    }


def token_fields(prompt_ids: Int32, output_ids: Int32, logprobs: Float32) -> dict[str, Any]:
    """What the last item of a trained reply has beside its text."""
    return {"prompt_token_ids": prompt_ids, "generation_token_ids": output_ids, "generation_log_probs": logprobs}


def items_of(message: Message, place: str) -> list[dict[str, Any]]:
    """A message as items of the Responses API. A reply's text comes before its tool calls."""
    if message["role"] == "tool":
        fields = {"call_id": message.get("tool_call_id", ""), "output": content_text(message)}
        return [{"type": "function_call_output", **fields, "status": "completed"}]
    if message["role"] != "assistant":
        content = message.get("content") or ""
        parts = content if isinstance(content, str) else [_part(part) for part in content]
        return [{"type": "message", "role": message["role"], "content": parts}]
    items: list[dict[str, Any]] = []
    calls = message.get("tool_calls") or ()
    if reasoning := message.get("reasoning_content"):
        summary = [{"type": "summary_text", "text": reasoning}]
        items.append({"type": "reasoning", "id": f"rs_{place}", "summary": summary})
    if (text := content_text(message)) or not calls:
        content = [{"type": "output_text", "text": text, "annotations": []}]
        items.append(
            {"type": "message", "id": f"msg_{place}", "role": "assistant", "content": content, "status": "completed"}
        )
    for call in calls:
        function = as_text(call["function"])
        fields = {"name": function["name"], "arguments": function["arguments"], "call_id": call["id"]}
        items.append({"type": "function_call", "id": call["id"], **fields, "status": "completed"})
    return items


def _part(part: Mapping[str, Any]) -> dict[str, Any]:
    if part["type"] == "text":
        return {"type": "input_text", "text": part["text"]}
    return {"type": "input_image", "image_url": part["image_url"]["url"], "detail": "auto"}


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool.get("function", tool)
    return {
        "type": "function",
        "name": function["name"],
        "description": function.get("description"),
        "parameters": function.get("parameters"),
        "strict": function.get("strict"),
    }
