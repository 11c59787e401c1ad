"""One conversation through the clients that people use: the vendors' SDKs, LiteLLM and LangChain.

Each keeps its history as that client's users do, in the client's own objects, so that what comes back to the proxy is
what they would send. Nothing here knows rolltap but its URL and key.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import anthropic
import httpx
import openai
from google import genai
from google.genai import types as genai_types

from rolltap.harnesses.base import Endpoint

TOOL = "look"
ABOUT = "Looks at a place."
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"place": {"type": "string"}},
    "required": ["place"],
    "additionalProperties": False,
}
MAX_TOKENS = 512


@dataclass
class Use:
    """A tool call as a client gave it to its user."""

    id: str
    arguments: dict[str, Any]


@dataclass
class Said:
    """A reply as a client gave it to its user; `cached` and `output` are token counts, -1 where it has none."""

    text: str
    reasoning: str = ""
    uses: list[Use] = field(default_factory=list)
    prompt: int = -1
    output: int = -1
    cached: int = -1


class Conversation:
    """A conversation with one tool. `shows_reasoning`: the client gives its user the model's thinking."""

    shows_reasoning = True

    def __init__(self, endpoint: Endpoint, closing: AsyncExitStack, *, stream: bool, retries: int = 0) -> None:
        self.endpoint = endpoint
        self.stream = stream
        self.retries = retries
        self.history: list[Any] = []
        self.last = Said("")
        self.connect(closing)

    @abstractmethod
    def connect(self, closing: AsyncExitStack) -> None:
        """Makes the client, to be closed with `closing`."""

    @abstractmethod
    async def ask(self) -> Said:
        """The reply to the history, which is then part of it."""

    async def say(self, text: str) -> Said:
        self.history.append({"role": "user", "content": text})
        self.last = await self.ask()
        return self.last

    async def answer(self, *results: str) -> Said:
        """Answers the last reply's tool calls, in their order."""
        self.tell(list(zip(self.last.uses, results, strict=True)))
        self.last = await self.ask()
        return self.last

    def tell(self, results: Sequence[tuple[Use, str]]) -> None:
        """Puts tool results into the history."""
        self.history += [{"role": "tool", "tool_call_id": use.id, "content": text} for use, text in results]


FUNCTION = {"name": TOOL, "description": ABOUT, "parameters": SCHEMA}
CHAT_TOOLS: Any = [{"type": "function", "function": {**FUNCTION, "strict": True}}]
RESPONSES_TOOLS: Any = [{"type": "function", **FUNCTION, "strict": False}]
ANTHROPIC_TOOLS: Any = [{"name": TOOL, "description": ABOUT, "input_schema": SCHEMA}]


def chat_said(message: Any, usage: Any) -> Said:
    """A reply in the objects of Chat Completions."""
    uses = [Use(call.id, json.loads(call.function.arguments)) for call in message.tool_calls or []]
    reasoning = getattr(message, "reasoning_content", None) or ""
    cached = usage.prompt_tokens_details.cached_tokens or 0
    return Said(message.content or "", reasoning, uses, usage.prompt_tokens, usage.completion_tokens, cached)


class OpenAIChat(Conversation):
    """The `openai` SDK's Chat Completions."""

    def connect(self, closing: AsyncExitStack) -> None:
        self.client = openai.AsyncOpenAI(
            api_key=self.endpoint.key, base_url=f"{self.endpoint.base_url}/v1", max_retries=self.retries
        )
        closing.push_async_callback(self.client.close)

    async def ask(self) -> Said:
        common: Any = {"model": self.endpoint.model, "messages": self.history, "tools": CHAT_TOOLS}
        if self.stream:
            async with self.client.chat.completions.stream(**common, stream_options={"include_usage": True}) as stream:
                final: Any = await stream.get_final_completion()
        else:
            final = await self.client.chat.completions.create(**common)
        message = final.choices[0].message
        self.history.append(message.model_dump(exclude_none=True) if self.stream else message)
        return chat_said(message, final.usage)


class OpenAIResponses(OpenAIChat):
    """The `openai` SDK's Responses; the reply's items are sent back."""

    async def ask(self) -> Said:
        final = await self.response(input=self.history, include=["reasoning.encrypted_content"], store=False)
        items = [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in final.output]
        self.history += items if self.stream else final.output
        return self.read(final)

    async def response(self, **fields: Any) -> Any:
        common: Any = {"model": self.endpoint.model, "tools": RESPONSES_TOOLS, **fields}
        if not self.stream:
            return await self.client.responses.create(**common)
        async with self.client.responses.stream(**common) as stream:
            return await stream.get_final_response()

    def read(self, response: Any) -> Said:
        uses = [
            Use(item.call_id, json.loads(item.arguments)) for item in response.output if item.type == "function_call"
        ]
        thoughts = [part.text for item in response.output if item.type == "reasoning" for part in item.summary]
        usage = response.usage
        cached = usage.input_tokens_details.cached_tokens
        return Said(response.output_text, "".join(thoughts), uses, usage.input_tokens, usage.output_tokens, cached)

    def tell(self, results: Sequence[tuple[Use, str]]) -> None:
        self.history += [{"type": "function_call_output", "call_id": use.id, "output": text} for use, text in results]


class OpenAIResponsesById(OpenAIResponses):
    """The `openai` SDK's Responses; what was said is named by `previous_response_id`, only what is new is sent."""

    previous: str | None = None

    async def ask(self) -> Said:
        named = {"previous_response_id": self.previous} if self.previous else {}
        final = await self.response(input=self.history, **named)
        self.previous, self.history = final.id, []
        return self.read(final)


class Anthropic(Conversation):
    """The `anthropic` SDK's Messages."""

    def connect(self, closing: AsyncExitStack) -> None:
        self.client = anthropic.AsyncAnthropic(
            api_key=self.endpoint.key, base_url=self.endpoint.base_url, max_retries=self.retries
        )
        closing.push_async_callback(self.client.close)

    async def ask(self) -> Said:
        common: Any = {"model": self.endpoint.model, "max_tokens": MAX_TOKENS, "tools": ANTHROPIC_TOOLS}
        if self.stream:
            async with self.client.messages.stream(**common, messages=self.history) as stream:
                final: Any = await stream.get_final_message()
        else:
            final = await self.client.messages.create(**common, messages=self.history)
        self.history.append({"role": "assistant", "content": final.content})
        usage, cached = final.usage, final.usage.cache_read_input_tokens or 0
        return Said(
            "".join(block.text for block in final.content if block.type == "text"),
            "".join(block.thinking for block in final.content if block.type == "thinking"),
            [Use(block.id, block.input) for block in final.content if block.type == "tool_use"],
            usage.input_tokens + cached,
            usage.output_tokens,
            cached,
        )

    def tell(self, results: Sequence[tuple[Use, str]]) -> None:
        content = [{"type": "tool_result", "tool_use_id": use.id, "content": text} for use, text in results]
        self.history.append({"role": "user", "content": content})


class Gemini(Conversation):
    """The `google-genai` SDK; its own `chats` keep the history."""

    def connect(self, closing: AsyncExitStack) -> None:
        retry = genai_types.HttpRetryOptions(attempts=self.retries + 1, initial_delay=0.1, max_delay=0.2)
        http = httpx.AsyncClient()
        closing.push_async_callback(http.aclose)
        options = genai_types.HttpOptions(base_url=self.endpoint.base_url, retry_options=retry, httpx_async_client=http)
        self.client = genai.Client(api_key=self.endpoint.key, http_options=options)
        closing.callback(self.client.close)
        closing.push_async_callback(self.client.aio.aclose)
        look = genai_types.FunctionDeclaration(name=TOOL, description=ABOUT, parameters_json_schema=SCHEMA)
        config = genai_types.GenerateContentConfig(
            tools=[genai_types.Tool(function_declarations=[look])],
            thinking_config=genai_types.ThinkingConfig(include_thoughts=True),
        )
        self.chat = self.client.aio.chats.create(model=self.endpoint.model, config=config)

    async def ask(self) -> Said:
        message, self.history = self.history[-1], []
        told: Any = message["content"] if isinstance(message, dict) else message
        if self.stream:
            replies = [reply async for reply in await self.chat.send_message_stream(told)]
        else:
            replies = [await self.chat.send_message(told)]
        contents = [reply.candidates[0].content for reply in replies if reply.candidates]
        parts = [part for content in contents if content is not None for part in content.parts or []]
        calls = [part.function_call for part in parts if part.function_call is not None]
        usage = replies[-1].usage_metadata
        assert usage is not None
        return Said(
            "".join(part.text or "" for part in parts if not part.thought),
            "".join(part.text or "" for part in parts if part.thought),
            [Use(call.id or "", dict(call.args or {})) for call in calls],
            usage.prompt_token_count or 0,
            (usage.candidates_token_count or 0) + (usage.thoughts_token_count or 0),
            usage.cached_content_token_count or 0,
        )

    def tell(self, results: Sequence[tuple[Use, str]]) -> None:
        self.history.append(
            [
                genai_types.Part(
                    function_response=genai_types.FunctionResponse(id=use.id, name=TOOL, response={"output": text})
                )
                for use, text in results
            ]
        )
