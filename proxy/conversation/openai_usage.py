"""The token counts of an OpenAI-style reply, which a chat upstream and a vendor both send."""

from __future__ import annotations

import msgspec

from rolltap.proxy.conversation.chat import Usage


class PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class OutputDetails(msgspec.Struct):
    reasoning_tokens: int | None = None


class OpenAIUsage(msgspec.Struct):
    """Token counts. None: the server did not count."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None
    completion_tokens_details: OutputDetails | None = None

    def usage(self) -> Usage:
        cached = self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details else 0
        reasoning = self.completion_tokens_details.reasoning_tokens if self.completion_tokens_details else 0
        return Usage(self.prompt_tokens or 0, self.completion_tokens or 0, cached or 0, reasoning or 0)
