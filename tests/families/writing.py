"""A family's sampled turns: scripted replies as the token ids that a model of the family would have sampled.

The family's own renderer or template writes the turn as part of a conversation. What stands after the generation prompt
is the reply. A thinking block that the generation prompt has opened, or left out, is respected. `split` of a scripted
reply then makes ids of the text that no tokenizer would choose, so that a prompt which repeats them can't be a
rendering of the text.
"""

from __future__ import annotations

import json
import random
import re
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rolltap.engine.scripted.script import ScriptedReply
from rolltap.engine.scripted.writing import ScriptedReplyWriter, ScriptTokenizer
from rolltap.proxy.continuation.template import ChatTemplate

from .families import HARMONY, Family
from .vocabularies import prepare_harmony

Row = Mapping[str, Any]
USER: Row = {"role": "user", "content": "."}
TAIL = 64
"""So many tokens of a prompt hold its generation prompt."""


class ConversationText(Protocol):
    """A conversation as the family's text."""

    def __call__(self, rows: Sequence[Row], *, prompt: bool, thinking: bool) -> str: ...


class FamilyReplyWriter(ScriptedReplyWriter):
    """Writes the replies of a scripted engine for one family, over the family's model folder."""

    def __init__(self, family: Family, folder: Path) -> None:
        self.tokenizer = ScriptTokenizer(folder)
        self._encoded = self.tokenizer.encode
        self._family = family
        make = _package if family.renderer else _template
        self._text, self.stop_ids = make(family, self.tokenizer)
        self._units = re.compile("|".join([*map(re.escape, family.markup.tokens), "."]), re.DOTALL)
        self._before = {on: self._text([USER], prompt=False, thinking=on) for on in (True, False)}
        self._headers = {
            on: self._text([USER], prompt=True, thinking=on).removeprefix(self._before[on]) for on in (True, False)
        }

    def write(self, reply: ScriptedReply, prompt: Sequence[int]) -> list[int]:
        if reply.ids is not None or reply.text is not None:
            return super().write(reply, prompt)
        text = self._harmony(reply, prompt) if self._family.markup is HARMONY else self._sampled(reply, prompt)
        ids = self.tokenizer.encode(text)
        stop = next((at for at, token in enumerate(ids) if token in self.stop_ids), len(ids))
        return self._split(ids[: stop + reply.end], reply.split)

    def respelled(self, ids: Sequence[int]) -> list[int]:
        """Other ids of the same text, where the vocabulary has such."""
        return self._split(list(ids), "odd")

    def _sampled(self, reply: ScriptedReply, prompt: Sequence[int]) -> str:
        """What the family writes for the turn after the end of `prompt`, with the token that ends it."""
        tail = self.tokenizer.decode(list(prompt[-TAIL:]))
        thinking, header = max(
            ((on, header) for on, header in self._headers.items() if tail.endswith(header)),
            key=lambda match: len(match[1]),
            default=(True, ""),  # the turn goes on after a tool's result, as Gemma's do
        )
        opening, closing = self._family.markup.thinking
        closed = closing in header
        written = self._turn(reply, prompt, thinking=thinking, thought="" if closed else reply.think)
        shared = self._common(written, header or self._headers[True])
        opened, rest = header[shared:], written[shared:]
        opens = tail.rstrip().endswith(opening.rstrip())
        if rest.startswith(opened) and (header or not opens):
            return rest[len(opened) :]
        bare = rest.partition(closing)[2] if closing in rest else rest
        is_thinking = opens if not header else opening.strip() in header and not closed
        return f"{reply.think}{closing}{bare}" if is_thinking else bare

    def _harmony(self, reply: ScriptedReply, prompt: Sequence[int]) -> str:
        """A turn of gpt-oss as it is sampled: a history, which its renderers write, has no analysis and other ends."""
        analysis, then = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant"
        opened = self.tokenizer.decode(list(prompt[-TAIL:])).endswith(analysis)
        thought = f"{'' if opened else analysis}{reply.think}{then}" if opened or reply.think else ""
        if not reply.call:
            return f"{thought}<|channel|>final<|message|>{reply.say}<|return|>"
        preamble = f"<|channel|>commentary<|message|>{reply.say}{then}" if reply.say else ""
        (use,) = reply.call
        arguments = json.dumps(use.arguments, ensure_ascii=False)
        call = f"<|channel|>commentary to=functions.{use.tool} <|constrain|>json<|message|>{arguments}<|call|>"
        return thought + preamble + call

    def _turn(self, reply: ScriptedReply, prompt: Sequence[int], *, thinking: bool, thought: str) -> str:
        """The turn as the family writes it in a history that has nothing after it that would end its thinking."""
        turn, after = self._rows(reply, prompt, thought)
        before = self._before[thinking]
        alone = self._text([USER, turn], prompt=False, thinking=thinking).removeprefix(before)
        followed = self._text([USER, turn, *after], prompt=False, thinking=thinking).removeprefix(before)
        if reply.call:
            return followed
        if any(token in self.stop_ids for token in self.tokenizer.encode(alone)):
            return alone
        after_turn = self.tokenizer.encode(followed[self._common(alone, followed) :])
        return alone + self.tokenizer.decode(next(token for token in after_turn if token in self.stop_ids))

    def _common(self, left: str, right: str) -> int:
        """The length of the common beginning that ends in no special token."""
        size = 0
        for one, other in zip(self._units.findall(left), self._units.findall(right), strict=False):
            if one != other:
                break
            size += len(one)
        return size

    def _rows(self, reply: ScriptedReply, prompt: Sequence[int], thought: str) -> tuple[Row, Sequence[Row]]:
        """The turn, and the rows that follow it."""
        turn: dict[str, Any] = {"role": "assistant", "content": reply.say}
        if thought:
            turn |= {"reasoning_content": thought, "thinking": thought}
        if not reply.call:
            return turn, [USER]
        ids = [self._call_id(use.tool, prompt, at) for at, use in enumerate(reply.call)]
        turn["tool_calls"] = [
            {"id": id, "type": "function", "function": {"name": use.tool, "arguments": use.arguments}}
            for id, use in zip(ids, reply.call, strict=True)
        ]
        results = [
            {"role": "tool", "content": ".", "tool_call_id": id, "name": use.tool}
            for id, use in zip(ids, reply.call, strict=True)
        ]
        return turn, results

    def _call_id(self, tool: str, prompt: Sequence[int], at: int) -> str:
        """An id in the form that the family's model samples, if it samples any."""
        if self._family.name.startswith("kimi"):
            begin = self.tokenizer.convert_tokens_to_ids("<|tool_call_begin|>")
            return f"functions.{tool}:{sum(token == begin for token in prompt) + at}"
        return "".join(random.Random(len(prompt) + at).choices(string.ascii_letters + string.digits, k=9))


def _package(family: Family, tokenizer: ScriptTokenizer) -> tuple[ConversationText, frozenset[int]]:
    if family.markup is HARMONY:
        prepare_harmony()
    import renderers

    config: Any = renderers.config_from_name(family.renderer)
    fields = type(config).model_fields
    made: dict[bool, Any] = {}
    for on in (True, False):
        options: dict[str, Any] = {"thinking_retention": "all"} if "thinking_retention" in fields else {}
        options |= {"enable_thinking": on} if "enable_thinking" in fields else {}
        made[on] = renderers.create_renderer(tokenizer, type(config)(**options))

    def text(rows: Sequence[Row], *, prompt: bool, thinking: bool) -> str:
        ids = made[thinking].render_ids([dict(row) for row in rows], add_generation_prompt=prompt)
        return tokenizer.decode(ids)

    return text, frozenset(made[True].get_stop_token_ids())


def _template(family: Family, tokenizer: ScriptTokenizer) -> tuple[ConversationText, frozenset[int]]:
    markup = family.markup
    template = ChatTemplate(family.template_text(), {"bos_token": markup.begin, "eos_token": markup.end})

    def text(rows: Sequence[Row], *, prompt: bool, thinking: bool) -> str:
        try:
            return template(list(rows), None, prompt=prompt, thinking=thinking)
        except template.error:  # DeepSeek's wants the arguments as text
            return template([_with_texts(row) for row in rows], None, prompt=prompt, thinking=thinking)

    return text, frozenset(tokenizer.convert_tokens_to_ids(markup.ends))


def _with_texts(row: Row) -> Row:
    """The row with the arguments of its calls as text."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in row.get("tool_calls", ())
    ]
    return {**row, "tool_calls": calls} if calls else row
