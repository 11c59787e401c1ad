"""OpenAI Chat Completions of an upstream: the request that is sent, and the types of its events.

There are three ways to request token ids, and a server supports one of them: vLLM's `return_token_ids`, SGLang's
response headers (`sglext`), or none. Source: vLLM 0.32 and SGLang 0.5.23, `entrypoints/openai/`.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from rolltap.protocols.conversation import TOOL_ERROR, Image, Message, Part, Reasoning, Tool, ToolChoice
from rolltap.protocols.openai_chat.pieces import OpenAIUsage, ReplyChoice
from rolltap.proxy.engines import decode
from rolltap.proxy.engines.base import ChatCall

IdsBy = Literal["vllm", "sglang", "none"]

FINISHES: dict[str, Any] = {
    **decode.FINISHES,
    **dict.fromkeys(("tool_calls", "tool_call", "tool_use", "function_call"), "tool_calls"),
}


class Token(msgspec.Struct):
    logprob: float | None = None


class Logprobs(msgspec.Struct):
    content: list[Token] | None = None


class Choice(ReplyChoice):
    logprobs: Logprobs | None = None
    token_ids: list[int] | None = None


class SglExt(msgspec.Struct):
    input_ids: list[int] | None = None
    output_ids: list[list[int]] | None = None


class ChatEvent(msgspec.Struct):
    choices: list[Choice | None] | None = None
    prompt_token_ids: list[int] | None = None
    usage: OpenAIUsage | None = None
    sglext: SglExt | None = None
    error: decode.Problem | str | None = None

    @property
    def choice(self) -> Choice | None:
        """The only choice: requests ask for one."""
        return next((choice for choice in self.choices or () if choice is not None and not choice.index), None)


read_events = decode.event_reader(ChatEvent)


def headers_of(call: ChatCall, ids_by: IdsBy) -> dict[str, str]:
    headers = {"x-session-id": call.session_id} if call.session_id else {}
    if ids_by == "sglang":
        headers |= {"x-sglext-return-input-ids": "1", "x-sglext-return-output-ids": "1"}
        headers |= {"x-smg-routing-key": call.session_id} if call.session_id else {}
    return headers


def body_of(call: ChatCall, ids_by: IdsBy) -> dict[str, Any]:
    """The request body. Sampling parameters that neither harness nor policy sets are left to the upstream."""
    sampling, chat = call.sampling, call.chat
    plain = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "seed")
    penalties = ("presence_penalty", "frequency_penalty", "repetition_penalty")
    body: dict[str, Any] = {
        "model": call.model,
        "messages": [_message(message) for message in chat.messages],
        "stream": True,
        "stream_options": {"include_usage": True},
        **{name: value for name in plain + penalties if (value := getattr(sampling, name)) is not None},
    }
    if chat.tools:
        body["tools"] = [_tool(tool) for tool in chat.tools]
        body |= _choice(chat.tool_choice)
    if sampling.stop:
        body["stop"] = list(sampling.stop)
    if sampling.json_schema is not None:
        reply = {"name": "reply", "schema": sampling.json_schema, "strict": True}
        of_schema = {"type": "json_schema", "json_schema": reply}
        body["response_format"] = of_schema if sampling.json_schema else {"type": "json_object"}
    if sampling.effort is not None:
        body["reasoning_effort"] = sampling.effort
    if sampling.thinking is not None and ids_by != "none":
        body["chat_template_kwargs"] = {"enable_thinking": sampling.thinking}
    if ids_by != "none":
        body["logprobs"] = True
    if ids_by == "vllm":
        body |= {"return_token_ids": True, "return_tokens_as_token_ids": True}
    return body


def _message(message: Message) -> dict[str, Any]:
    row: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    content: str | list[dict[str, Any]] = message.text
    if any(isinstance(part, Image) for part in message.parts):
        error = [{"type": "text", "text": TOOL_ERROR}] if message.is_error else []
        content = [*error, *(_part(part) for part in message.parts if not isinstance(part, Reasoning))]
    row["content"] = None if message.role == "assistant" and not content and message.tool_calls else content
    if message.reasoning:
        row["reasoning"] = row["reasoning_content"] = message.reasoning
    if message.reasoning_details:
        row["reasoning_details"] = list(message.reasoning_details)
    if message.tool_calls:
        row["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": _arguments(call)},
                **call.extra,
            }
            for call in message.tool_calls
        ]
    if message.role == "tool":
        row["tool_call_id"] = message.tool_call_id or ""
    if message.name:
        row["name"] = message.name
    return row


def _arguments(call: Any) -> str:
    """A custom tool's free text as the one argument that `_tool` declares for it."""
    if call.kind == "custom":
        return msgspec.json.encode({"input": call.arguments}).decode()
    return call.arguments


def _part(part: Part) -> dict[str, Any]:
    if isinstance(part, Image):
        url = {"url": part.url} | ({"detail": part.detail} if part.detail else {})
        return {"type": "image_url", "image_url": url}
    return {"type": "text", "text": part.text}


def _tool(tool: Tool) -> dict[str, Any]:
    parameters: dict[str, Any] = tool.parameters or {"type": "object", "properties": {}}
    if tool.kind == "custom":
        parameters = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    function = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": function}


def _choice(choice: ToolChoice) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if choice.mode == "named" and len(choice.names) == 1:
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.names[0]}}
    elif choice.mode == "named":
        fields["tool_choice"] = "required"
    elif choice.mode != "auto":
        fields["tool_choice"] = choice.mode
    if not choice.parallel:
        fields["parallel_tool_calls"] = False
    return fields
