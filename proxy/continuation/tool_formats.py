"""The formats of tool calls: those of the `renderers` families, and those that chat templates write.

Detection renders a message with a known call. The template's format is the one whose reader returns the same call.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rolltap.errors import ConfigError
from rolltap.protocols.conversation import Tool
from rolltap.proxy.continuation.json_calls import HERMES, MISTRAL
from rolltap.proxy.continuation.json_formats import (
    read_deepseek,
    read_hermes,
    read_kimi,
    read_llama,
    read_mistral,
)
from rolltap.proxy.continuation.literal_formats import read_gemma, read_lfm2, read_lfm2_unescaped
from rolltap.proxy.continuation.markers import Markers
from rolltap.proxy.continuation.message_formats import read_dsml, read_harmony, read_inkling_reply
from rolltap.proxy.continuation.parsed import ParsedReply, ReplyPiece
from rolltap.proxy.continuation.sampled_blocks import CallBlock, Read, SampledCall
from rolltap.proxy.continuation.tagged_formats import read_glm, read_hy3, read_minimax, read_qwen_xml
from rolltap.tokenizer import HubTokenizer

ReadReply = Callable[[HubTokenizer, Sequence[int], Sequence[int], Sequence[Tool]], ParsedReply]
FindPieces = Callable[[HubTokenizer, Sequence[int], int, Sequence[Tool]], list[ReplyPiece]]


def _read_nothing(block: CallBlock) -> list[SampledCall] | None:
    return []


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """`opening` and `closing` are the tokens around a block, which `read` reads.

    Without an opening token, a reply is a call only if its text begins with one of `beginnings`; or `find_pieces` finds
    the blocks in a reply after its thinking; or `read_reply` reads all of it. `head` matches the text before a call's
    arguments, if these are JSON in their own block. `thinking` are the tags of thinking; they are spelled in ordinary
    tokens if the vocabulary has no such tokens and the format `thinks_in_text`. `label` begins thinking.
    """

    read: Read = _read_nothing
    opening: str = ""
    closing: str = ""
    beginnings: tuple[str, ...] = ()
    head: re.Pattern[str] | None = None
    thinking: tuple[str, str] = ("<think>", "</think>")
    thinks_in_text: bool = False
    label: str = ""
    find_pieces: FindPieces | None = None
    read_reply: ReadReply | None = None

    def markers(self, tokenizer: HubTokenizer) -> Markers:
        reasoning_open, reasoning_close, tool_open, tool_close = map(
            tokenizer.convert_tokens_to_ids, (*self.thinking, self.opening, self.closing)
        )
        is_streamed = self.find_pieces is None and self.read_reply is None
        is_streamed = is_streamed and not (self.thinks_in_text and reasoning_open is None)
        return Markers(
            reasoning_open,
            reasoning_close,
            tool_open,
            tool_close,
            beginnings=self.beginnings if is_streamed else None,
            call_head=self.head,
            reasoning_label=self.label,
        )


TOOL_FORMATS: dict[str, ToolFormat] = {
    "hermes": ToolFormat(read_hermes, "<tool_call>", "</tool_call>", head=HERMES),
    "qwen-xml": ToolFormat(read_qwen_xml, "<tool_call>", "</tool_call>"),
    "glm": ToolFormat(read_glm, "<tool_call>", "</tool_call>"),
    "deepseek": ToolFormat(read_deepseek, "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", thinks_in_text=True),
    "kimi": ToolFormat(read_kimi, "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", thinks_in_text=True),
    "minimax": ToolFormat(read_minimax, "<minimax:tool_call>", "</minimax:tool_call>"),
    "mistral": ToolFormat(read_mistral, "[TOOL_CALLS]", head=MISTRAL),
    "gemma4": ToolFormat(
        read_gemma, "<|tool_call>", "<tool_call|>", thinking=("<|channel>", "<channel|>"), label="thought\n"
    ),
    "hy3": ToolFormat(
        read_hy3,
        "<tool_calls:opensource>",
        "</tool_calls:opensource>",
        thinking=("<think:opensource>", "</think:opensource>"),
    ),
    "lfm2": ToolFormat(read_lfm2, "<|tool_call_start|>", "<|tool_call_end|>"),
    "lfm2-unescaped": ToolFormat(read_lfm2_unescaped, "<|tool_call_start|>", "<|tool_call_end|>"),
    "llama": ToolFormat(read_llama, "<|python_tag|>", beginnings=("{",)),
    "deepseek-v4": ToolFormat(find_pieces=read_dsml),
    "gpt-oss": ToolFormat(read_reply=read_harmony),
    "inkling": ToolFormat(read_reply=read_inkling_reply),
    "none": ToolFormat(),
}

FAMILY_FORMATS = {
    "qwen3": "hermes",
    "qwen3-vl": "hermes",
    "prime-qwen3": "qwen-xml",
    "qwen3.5": "qwen-xml",
    "qwen3.6": "qwen-xml",
    "qwen3.8": "qwen-xml",
    "nemotron-3": "qwen-xml",
    "nemotron-3-ultra": "qwen-xml",
    "nemotron-3.5": "qwen-xml",
    "glm-4.5": "glm",
    "glm-5": "glm",
    "glm-5.1": "glm",
    "glm-5.3": "glm",
    "laguna-xs.2": "glm",
    "laguna-m.1": "glm",
    "laguna-xs-2.1": "glm",
    "laguna-s-2.1": "glm",
    "hy3": "hy3",
    "kimi-k2": "kimi",
    "kimi-k2.5": "kimi",
    "deepseek-v3": "deepseek",
    "deepseek-r1": "deepseek",
    "deepseek-v4": "deepseek-v4",
    "minimax-m2": "minimax",
    "gemma4": "gemma4",
    "llama-3": "llama",
    "gpt-oss": "gpt-oss",
    "inkling": "inkling",
}
"""The format of each family of the `renderers` package. rolltap reads the replies itself: the package strips values,
merges calls and takes parts of a block for a whole."""


def find_tool_format(name: str) -> ToolFormat:
    """The format with this name. Raises `ConfigError`, which lists the known ones."""
    try:
        return TOOL_FORMATS[name]
    except KeyError:
        raise ConfigError(f"no tool format {name!r}; known: {', '.join(TOOL_FORMATS)}") from None


def format_of_family(family: str) -> ToolFormat:
    try:
        return TOOL_FORMATS[FAMILY_FORMATS[family]]
    except KeyError:
        raise ConfigError(
            f"rolltap does not read the replies of renderer family {family!r}; known: {', '.join(FAMILY_FORMATS)}"
        ) from None
