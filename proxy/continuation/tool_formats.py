"""The formats of tool calls: those of the `renderers` families, and those that chat templates write.

Detection renders a message with a known call. The template's format is the one whose reader returns the same call.

Most formats have a token that opens a block of calls (`block_formats`). gpt-oss (Harmony), Inkling and DeepSeek-V4 have
none: their replies are read here. What belongs to no channel of the format is text, with its tokens.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from rolltap.errors import ConfigError
from rolltap.protocols.conversation import Tool
from rolltap.proxy.continuation.block_formats import (
    CallBlock,
    Read,
    SampledCall,
    checked_calls,
    read_deepseek,
    read_function_gemma,
    read_gemma,
    read_glm,
    read_hermes,
    read_hy3,
    read_inkling,
    read_kimi,
    read_lfm2,
    read_lfm2_unescaped,
    read_llama,
    read_minimax,
    read_mistral,
    read_pythonic,
    read_qwen_xml,
)
from rolltap.proxy.continuation.json_calls import HERMES, MISTRAL
from rolltap.proxy.continuation.parsed import CONTEXT, ParsedCall, ParsedReply, ReplyPiece
from rolltap.proxy.continuation.typed_values import object_of
from rolltap.tokenizer import HubTokenizer
from rolltap.wording import did_you_mean

ReadReply = Callable[[HubTokenizer, Sequence[int], Sequence[int], Sequence[Tool]], ParsedReply]
FindPieces = Callable[[HubTokenizer, Sequence[int], int, Sequence[Tool]], list[ReplyPiece]]


@dataclass(frozen=True, slots=True)
class Markers:
    """The token ids that separate a family's channels; None if the family has no such token.

    `beginnings`: how the text of a reply begins that is a tool call in plain text; None if replies can be read only
    when they are complete. `call_head` matches the text between a call's opening token and its arguments, if these are
    JSON. `reasoning_label` is what a family writes at the beginning of its thinking.
    """

    reasoning_open: int | None
    reasoning_close: int | None
    tool_open: int | None
    tool_close: int | None
    beginnings: tuple[str, ...] | None = ()
    call_head: re.Pattern[str] | None = None
    reasoning_label: str = ""

    def opens_in_reasoning(self, prompt: Sequence[int]) -> bool:
        """Whether the generation prompt opens a thinking block."""
        for token in reversed(prompt[-64:]):
            if token == self.reasoning_open:
                return True
            if token == self.reasoning_close:
                return False
        return False


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """`opening` and `closing` are the tokens around a block, which `read` reads.

    Without an opening token, a reply is a call only if its text begins with one of `beginnings`; or `find_pieces` finds
    the blocks in a reply after its thinking; or `read_reply` reads all of it. `head` matches the text before a call's
    arguments, if these are JSON in their own block. `thinking` are the tags of thinking; they are spelled in ordinary
    tokens if the vocabulary has no such tokens and the format `thinks_in_text`. `label` begins thinking.
    """

    read: Read = lambda block: []
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


_HARMONY_HEADER = re.compile(
    r"(?:assistant)?\s*(?:to=functions\.(?P<before>[^\s<]+)\s*)?"
    r"<\|channel\|>(?:commentary|analysis)\s*(?:to=functions\.(?P<after>[^\s<]+)\s*)?"
    r"(?:<\|constrain\|>\s*)?(?:(?:json|code)\s*)?"
)
"""The header of a tool call. The recipient stands before or after the channel."""


def read_harmony(
    tokenizer: HubTokenizer, output: Sequence[int], prompt: Sequence[int], tools: Sequence[Tool]
) -> ParsedReply:
    """Messages of `<|start|>HEADER<|message|>BODY` and a closing token. The prompt may hold the first one's beginning.

    A call's channel is `commentary`, or `analysis`, with a recipient in `functions`.
    """
    start, middle, *closings = map(
        tokenizer.convert_tokens_to_ids,
        ("<|start|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|endoftext|>"),
    )
    opened = list(prompt[-64:])
    is_opened = start in opened and list(output[:1]) != [start]
    before = opened[len(opened) - opened[::-1].index(start) :] if is_opened else []
    ids = [*before, *output]
    edges = [at for at in range(len(before), len(ids)) if ids[at] in (start, *closings)]
    pieces: list[ReplyPiece] = []
    thoughts: list[str] = []
    at = 0
    for last in [*edges, len(ids)]:
        own_at, after = max(at, len(before)), min(len(ids), last + (last < len(ids) and ids[last] != start))
        inner = ids[at + (ids[at : at + 1] == [start]) : last]
        header_size = inner.index(middle) if middle in inner else len(inner)
        header, body = tokenizer.decode(inner[:header_size]), inner[header_size + 1 :]
        whole = tokenizer.decode([id for id in ids[own_at:after] if id not in closings[-2:]])
        channel = re.search(r"<\|channel\|>\s*(\w+)", header)
        name = channel[1] if channel is not None else ""
        if middle in inner and "to=" in header:
            calls = (
                _harmony_call(header, CallBlock(tokenizer, body, tools))
                if last in edges and ids[last] not in (start, closings[-1])
                else None
            )
            broken = ParsedCall("", "", False, whole)
            pieces.append(ReplyPiece(whole, own_at - len(before), (broken,) if calls is None else calls))
        elif name == "analysis":
            thoughts.append(tokenizer.decode(body))
        elif middle in inner and name in ("final", "commentary"):
            pieces.append(_after(pieces, tokenizer.decode(body), own_at - len(before)))
        elif inner:
            pieces.append(_after(pieces, whole, own_at - len(before)))
        at = after
    reasoning = "".join(thoughts).strip() if thoughts else None
    return ParsedReply(tuple(piece for piece in pieces if piece.text.strip() or piece.calls is not None), reasoning)


def _after(pieces: Sequence[ReplyPiece], text: str, start: int) -> ReplyPiece:
    """The text of a message after `pieces`. Texts of different messages stand on lines of their own."""
    return ReplyPiece(f"\n{text}" if pieces and pieces[-1].calls is None and text else text, start)


def _harmony_call(header: str, block: CallBlock) -> tuple[ParsedCall, ...] | None:
    named = _HARMONY_HEADER.fullmatch(header)
    if named is None or (named["before"] is None) == (named["after"] is None):
        return None
    return checked_calls(lambda block: [SampledCall(named["before"] or named["after"], block.text.strip())], block)


def read_inkling_reply(
    tokenizer: HubTokenizer, output: Sequence[int], prompt: Sequence[int], tools: Sequence[Tool]
) -> ParsedReply:
    """Messages of a channel token, a body and `<|end_message|>`. The prompt may open the first one's channel."""
    model, text, thinking, invoke, end, *finishes = map(
        tokenizer.convert_tokens_to_ids,
        (
            "<|message_model|>",
            "<|content_text|>",
            "<|content_thinking|>",
            "<|content_invoke_tool_json|>",
            "<|end_message|>",
            "<|content_model_end_sampling|>",
            "<|endoftext|>",
        ),
    )
    last_opening = next((id for id in reversed(prompt[-64:]) if id in (model, text, thinking, end)), None)
    pieces: list[ReplyPiece] = []
    reasoning: str | None = None
    at = 0
    while at < len(output):
        last = next((place for place in range(at, len(output)) if output[place] in (end, *finishes)), len(output))
        body = list(output[at + (output[at] == model) : last])
        after = min(last + 1, len(output))
        whole = tokenizer.decode([id for id in output[at:after] if id not in finishes])
        channel = body[0] if body and body[0] in (text, thinking) else last_opening if at == 0 else None
        inner = body[1:] if body[:1] in ([text], [thinking]) else body
        if invoke in body:
            is_closed = last < len(output) and output[last] == end
            calls = checked_calls(read_inkling, CallBlock(tokenizer, body, tools)) if is_closed else None
            pieces.append(ReplyPiece(whole, at, calls if calls is not None else (ParsedCall("", "", False, whole),)))
        elif channel == thinking:
            reasoning = (reasoning or "") + tokenizer.decode(inner)
        elif channel == text and inner:
            pieces.append(ReplyPiece(tokenizer.decode(inner), at))
        elif channel != text and whole.strip():
            pieces.append(ReplyPiece(whole, at))
        at = after
    return ParsedReply(tuple(pieces), reasoning)


class IdIndex:
    """Finds the id to which a character of the decoded `ids` belongs, for one character after the other."""

    def __init__(self, tokenizer: HubTokenizer, ids: Sequence[int]) -> None:
        self._tokenizer, self._ids = tokenizer, ids
        stream = tokenizer.text_stream()
        self._ends = None if stream is None else list(accumulate(len(stream.feed([id])) for id in ids))
        self._count, self._length = 0, 0  # ids before the last character, and the length of their text

    def of(self, character: int) -> int:
        if self._ends is not None:
            return bisect_right(self._ends, character)
        first, total = self._count, len(self._ids)
        context = self._ids[max(0, first - CONTEXT) : first]
        before = self._length - len(self._tokenizer.decode(context))

        def length(count: int) -> int:
            return before + len(self._tokenizer.decode([*context, *self._ids[first:count]]))

        size = 8
        while first + size < total and length(first + size) <= character:
            size *= 2
        count = first + bisect_right(range(first + 1, min(first + size, total) + 1), character, key=length)
        self._count, self._length = count, length(count)
        return count


_MARK = "\ufdd1"
"""Stands for the token `｜DSML｜`: a Unicode non-character, which should not occur in text."""

DSML = "｜DSML｜"
_SECTION = re.compile(rf"\n{{0,2}}<{_MARK}((?:tool|function)_calls)>(.*?)(</{_MARK}\1>|\Z)", re.DOTALL)
_INVOKE = re.compile(rf'\s*<{_MARK}invoke name="([^"\n]+)">\s*+(.*?)</{_MARK}invoke>\s*', re.DOTALL)
_PARAMETER = re.compile(
    rf'<{_MARK}parameter name="([^"\n]+)" string="(true|false)">([^{_MARK}]*)</{_MARK}parameter>\s*'
)


def read_dsml(tokenizer: HubTokenizer, ids: Sequence[int], start: int, tools: Sequence[Tool]) -> list[ReplyPiece]:
    """DeepSeek-V3.2 and V4: the text and the sections of calls in `ids` from `start`. Types stand beside values."""
    rest = ids[start:]
    block = CallBlock(tokenizer, rest, tools)
    text = "".join(_MARK if part.is_tag else part.text.replace(_MARK, "\ufffd") for part in block.parts((DSML,)))

    index = IdIndex(tokenizer, rest)
    scale = len(DSML) - 1  # a mark stands for the token

    def piece(begin: int, end: int, calls: tuple[ParsedCall, ...] | None = None) -> ReplyPiece:
        at = index.of(begin + scale * text.count(_MARK, 0, begin))
        return ReplyPiece(text[begin:end].replace(_MARK, DSML), start + at, calls)

    pieces: list[ReplyPiece] = []
    at = 0
    for section in _SECTION.finditer(text):
        pieces.append(piece(at, section.start()))
        at = section.end()
        calls = _dsml_calls(section[2], block) if section[3] else None
        broken = ParsedCall("", "", False, section[0].replace(_MARK, DSML))
        pieces.append(piece(section.start(), at, (broken,) if calls is None else calls))
    return [*pieces, piece(at, len(text))]


def _dsml_calls(section: str, block: CallBlock) -> tuple[ParsedCall, ...] | None:
    calls: list[SampledCall] = []
    at = 0
    while invoke := _INVOKE.match(section, at):
        values: dict[str, str] = {}
        inner_at = 0
        while parameter := _PARAMETER.match(invoke[2], inner_at):
            key, is_string, value = parameter.groups()
            if key in values:
                return None
            values[key] = json.dumps(value, ensure_ascii=False) if is_string == "true" else value.strip()
            inner_at = parameter.end()
        if inner_at < len(invoke[2]):
            return None
        calls.append(SampledCall(invoke[1], object_of(values)))
        at = invoke.end()
    return checked_calls(lambda _: calls, block) if calls and at == len(section) else None


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
    "function-gemma": ToolFormat(read_function_gemma, "<start_function_call>", "<end_function_call>"),
    "hy3": ToolFormat(
        read_hy3,
        "<tool_calls:opensource>",
        "</tool_calls:opensource>",
        thinking=("<think:opensource>", "</think:opensource>"),
    ),
    "lfm2": ToolFormat(read_lfm2, "<|tool_call_start|>", "<|tool_call_end|>"),
    "lfm2-unescaped": ToolFormat(read_lfm2_unescaped, "<|tool_call_start|>", "<|tool_call_end|>"),
    "llama": ToolFormat(read_llama, "<|python_tag|>", beginnings=("{",)),
    "pythonic": ToolFormat(read_pythonic, "<|python_start|>", "<|python_end|>", beginnings=("[",)),
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
            f"{did_you_mean(family, FAMILY_FORMATS)}"
        ) from None
