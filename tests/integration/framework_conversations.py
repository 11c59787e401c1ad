"""The same conversation through LiteLLM and LangChain, which stand between many agents and a vendor.

They are imported when they are used: every worker imports this module, which would take four CPU seconds.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import httpx
import openai
from pydantic import SecretStr

from .sdk_conversations import CHAT_TOOLS, FUNCTION, MAX_TOKENS, Conversation, Said, Use, chat_said

if TYPE_CHECKING:
    from langchain_core.messages import AIMessage
    from langchain_openai import ChatOpenAI

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it asks the network otherwise


class LiteLLM(Conversation):
    """`litellm.acompletion` with its provider for OpenAI's protocol."""

    provider = "openai"
    path = "/v1"

    def connect(self, closing: AsyncExitStack) -> None:
        import litellm

        litellm.disable_aiohttp_transport = True
        self.client = self.http_client()
        closing.push_async_callback(self.client.close)

    def http_client(self) -> Any:
        """One to be closed; those that LiteLLM makes by itself stay open."""
        return openai.AsyncOpenAI(
            api_key=self.endpoint.key, base_url=f"{self.endpoint.base_url}/v1", max_retries=self.retries
        )

    async def ask(self) -> Said:
        import litellm

        common: Any = {
            "model": f"{self.provider}/{self.endpoint.model}",
            "api_base": f"{self.endpoint.base_url}{self.path}",
            "client": self.client,
            "api_key": self.endpoint.key,
            "messages": self.history,
            "tools": CHAT_TOOLS,
            "max_tokens": MAX_TOKENS,
            "num_retries": self.retries,
            "max_retries": 0,
        }
        if self.stream:
            stream: Any = await litellm.acompletion(**common, stream=True, stream_options={"include_usage": True})
            final: Any = litellm.stream_chunk_builder([chunk async for chunk in stream], messages=self.history)
        else:
            final = await litellm.acompletion(**common)
        message = final.choices[0].message
        self.history.append(message)
        return chat_said(message, final.usage)


class LiteLLMAnthropic(LiteLLM):
    """`litellm.acompletion` with its provider for Anthropic's protocol."""

    provider = "anthropic"
    path = ""

    def http_client(self) -> Any:
        from litellm.llms.custom_httpx.http_handler import AsyncHTTPHandler

        return AsyncHTTPHandler()


class LangChainChat(Conversation):
    """LangChain's `ChatOpenAI` on Chat Completions. It has no place for the thinking that this protocol carries."""

    shows_reasoning = False

    def connect(self, closing: AsyncExitStack) -> None:
        self.http = httpx.AsyncClient()
        closing.push_async_callback(self.http.aclose)
        self.model = self.chat_model(closing).bind_tools([{"type": "function", "function": FUNCTION}])

    def chat_model(self, closing: AsyncExitStack) -> Any:
        return self.openai()

    def openai(self, **options: Any) -> ChatOpenAI:
        from langchain_openai import ChatOpenAI

        return ChatOpenAI(
            model=self.endpoint.model,
            base_url=f"{self.endpoint.base_url}/v1",
            api_key=SecretStr(self.endpoint.key),
            max_retries=self.retries,
            stream_usage=True,
            http_async_client=self.http,
            **options,
        )

    async def say(self, text: str) -> Said:
        from langchain_core.messages import HumanMessage

        self.history.append(HumanMessage(text))
        self.last = await self.ask()
        return self.last

    async def ask(self) -> Said:
        from langchain_core.messages import AIMessageChunk

        reply: AIMessage
        if self.stream:
            whole: AIMessageChunk | None = None
            async for chunk in self.model.astream(self.history):
                assert isinstance(chunk, AIMessageChunk)
                whole = chunk if whole is None else whole + chunk
            assert whole is not None
            reply = whole
        else:
            reply = await self.model.ainvoke(self.history)
        self.history.append(reply)
        usage = reply.usage_metadata
        assert usage is not None
        thoughts = [block.get("reasoning", "") for block in reply.content_blocks if block["type"] == "reasoning"]
        return Said(
            str(reply.text),
            "".join(thoughts),
            [Use(call["id"] or "", call["args"]) for call in reply.tool_calls],
            usage["input_tokens"],
            usage["output_tokens"],
            usage.get("input_token_details", {}).get("cache_read", 0),
        )

    def tell(self, results: Sequence[tuple[Use, str]]) -> None:
        from langchain_core.messages import ToolMessage

        self.history += [ToolMessage(text, tool_call_id=use.id) for use, text in results]


class LangChainResponses(LangChainChat):
    """LangChain's `ChatOpenAI` on Responses."""

    shows_reasoning = True

    def chat_model(self, closing: AsyncExitStack) -> Any:
        return self.openai(use_responses_api=True, store=False, include=["reasoning.encrypted_content"])


class LangChainAnthropic(LangChainChat):
    """LangChain's `ChatAnthropic`."""

    shows_reasoning = True

    def chat_model(self, closing: AsyncExitStack) -> Any:
        from langchain_anthropic import ChatAnthropic

        model = ChatAnthropic(
            model_name=self.endpoint.model,
            base_url=self.endpoint.base_url,
            api_key=SecretStr(self.endpoint.key),
            max_tokens_to_sample=MAX_TOKENS,
            max_retries=self.retries,
            timeout=None,
            stop=None,
        )
        closing.push_async_callback(model._async_client.close)
        return model
