"""`/v1/chat/completions`, for chat mode: the server renders the prompt and says which tokens it used.

As vLLM does it (`return_token_ids`), as SGLang does (`sglext` at the end of the stream), or without any ids. Reasoning
and tool calls are read from the text as the hermes parsers do; a tool call comes when it is complete.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from rolltap.engine.scripted.sampling import Ask, Piece, Plan
from rolltap.engine.scripted.wires.base import Reader, scaled, session_of
from rolltap.engine.scripted.wires.vllm import usage_of
from rolltap.engine.scripted.writing import ScriptedReplyWriter
from rolltap.errors import InvalidRequest
from rolltap.images import RESIZED, ImageReader

IdsBy = Literal["vllm", "sglang", "none"]
THINK = re.compile(r"\A\s*<think>(.*?)(?:</think>|\Z)", re.S)
CALL = re.compile(r"<tool_call>((?:(?!<tool_call>).)*?)</tool_call>", re.S)


class ParsedText(msgspec.Struct):
    """The reasoning, the content and the tool calls of a reply's text so far."""

    reasoning: str = ""
    content: str = ""
    calls: list[dict[str, Any]] = []


class Chat:
    """`/v1/chat/completions` of a server that gives ids in one way, or in none."""

    path = "/v1/chat/completions"

    def __init__(
        self, mode: str, writer: ScriptedReplyWriter, ids_by: IdsBy, images: ImageReader | None = None
    ) -> None:
        self._images = images
        self._mode = mode
        self._writer = writer
        self._ids_by: IdsBy = ids_by

    def read(self, body: dict[str, Any], headers: Mapping[str, str]) -> Ask:
        reader = Reader(body)
        if body.get("return_token_ids") and self._ids_by != "vllm":
            raise InvalidRequest("return_token_ids is not supported with stream=true", param="return_token_ids")
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise InvalidRequest("messages must be a list that is not empty", param="messages")
        header = headers.get("x-sglext-return-output-ids") == "1" and self._ids_by == "sglang"
        return Ask(
            id=reader.text("request_id"),
            session=session_of(reader, headers),
            model=reader.text("model"),
            prompt_ids=self._writer.prompt([self._template_row(row) for row in messages], body.get("tools")),
            max_tokens=reader.integer("max_tokens"),
            temperature=reader.number("temperature"),
            logprobs=bool(body.get("logprobs")),
            stream=bool(body.get("stream")),
            echo=bool(body.get("return_token_ids")) or header,
            usage=bool(reader.inner("stream_options").body.get("include_usage")),
            stop_ids=self._writer.stop_ids,
        )

    def _template_row(self, row: dict[str, Any]) -> dict[str, Any]:
        """A message as templates want it: arguments as objects, content as text, placeholders for images."""
        message = {key: value for key, value in row.items() if key != "reasoning"}
        message["content"] = row.get("content") or ""
        if self._images is not None and isinstance(message["content"], list):
            message["content"] = "".join(map(self._part, message["content"]))
        if calls := row.get("tool_calls"):
            message["tool_calls"] = [
                {
                    **call,
                    "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"] or "{}")},
                }
                for call in calls
            ]
        return message

    def _part(self, part: dict[str, Any]) -> str:
        if part["type"] != "image_url" or self._images is None:
            return part["text"]
        tokens = self._images.read(part["image_url"]["url"]).tokens
        return f"<|vision_start|>{RESIZED * tokens}<|vision_end|>"

    def first(self, plan: Plan) -> Any | None:
        ids = plan.ask.prompt_ids if plan.ask.echo and self._ids_by == "vllm" else None
        choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        return {**_head(plan), "prompt_token_ids": ids, "choices": [choice]}

    def event(self, plan: Plan, piece: Piece) -> Any:
        before = self._parse(plan.ids[: piece.start], final=False)
        after = self._parse(plan.ids[: piece.start + len(piece.ids)], final=piece.finish is not None)
        delta: dict[str, Any] = {}
        if reasoning := after.reasoning[len(before.reasoning) :]:
            delta["reasoning"] = reasoning
        if content := after.content[len(before.content) :]:
            delta["content"] = content
        if calls := after.calls[len(before.calls) :]:
            name = f"call_{plan.entry.index}"
            delta["tool_calls"] = [
                {"index": at, "id": f"{name}_{at}", "type": "function", "function": call}
                for at, call in enumerate(calls, len(before.calls))
            ]
        finish = "tool_calls" if piece.finish == "stop" and after.calls else piece.finish
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": self._logprobs(plan, piece)}
        if plan.ask.echo and self._ids_by == "vllm":
            choice["token_ids"] = piece.ids
        return {**_head(plan), "choices": [choice]}

    def last(self, plan: Plan) -> Any | None:
        body: dict[str, Any] = {**_head(plan), "choices": []}
        if plan.ask.usage:
            body["usage"] = usage_of(plan)
        if plan.ask.echo and self._ids_by == "sglang":
            body["sglext"] = {"input_ids": plan.ask.prompt_ids, "output_ids": [plan.entry.output]}
        return body

    def whole(self, plan: Plan, piece: Piece) -> Any:
        parsed = self._parse(piece.ids, final=True)
        content, reasoning, calls = parsed.content, parsed.reasoning, parsed.calls
        message = {"role": "assistant", "content": content, "reasoning": reasoning, "tool_calls": calls}
        choice = {"index": 0, "message": message, "finish_reason": piece.finish}
        return {**_head(plan), "choices": [choice], "usage": usage_of(plan)}

    def _logprobs(self, plan: Plan, piece: Piece) -> dict[str, Any] | None:
        if piece.logprobs is None:
            return None
        pairs = zip(piece.ids, scaled(plan, piece.logprobs, self._mode), strict=False)
        return {"content": [{"token": f"token_id:{token}", "logprob": value} for token, value in pairs]}

    def _parse(self, ids: list[int], *, final: bool) -> ParsedText:
        """Parses the text of `ids`; half a character and half a tool call are held back unless nothing follows."""
        shown = [token for token in ids if token not in self._writer.stop_ids]
        text = self._writer.tokenizer.decode(shown)
        if not final:
            text = text.rstrip("\ufffd")
        thought = THINK.match(text)
        reasoning = thought[1].strip("\n") if thought else ""
        rest = text[thought.end() :] if thought else text
        calls = [call for block in CALL.findall(rest) if (call := _call(block)) is not None]
        content = CALL.sub("", rest).split("<tool_call>")[0].strip("\n")
        return ParsedText(reasoning, content, calls)


def _call(block: str) -> dict[str, Any] | None:
    try:
        call = json.loads(block)
        return {"name": call["name"], "arguments": json.dumps(call.get("arguments", {}))}
    except (ValueError, KeyError, TypeError):
        return None


def _head(plan: Plan) -> dict[str, Any]:
    return {"id": plan.ask.id, "object": "chat.completion.chunk", "created": int(time.time()), "model": plan.ask.model}
