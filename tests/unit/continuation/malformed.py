"""A generator of malformed tool calls, in each format that is read.

A call with known arguments is rendered by the model's own template, and its block is altered. What the reader may make
of it follows from the alteration and from rendering what was read, not from the reader:

- `same`: exactly these calls;
- `same or none`: exactly these calls, or the block is no call and the reply is marked;
- `none`: the block is no call, and the reply is marked;
- `proven`: if it is read as calls, rendering them gives the block again, but for white space.

`python -m tests.unit.continuation.malformed --calls 100000 [FORMAT...]` tries many.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rolltap.protocols.conversation import Message, Text, Tool, ToolCall
from rolltap.proxy.continuation.parsed import ParsedReply
from rolltap.proxy.continuation.parser import ReplyParser
from rolltap.proxy.continuation.template import TemplateRenderer
from rolltap.tokenizer import HubTokenizer

from .making import (
    CALLED_WITH_ESCAPES,
    FUNCTION_GEMMA,
    GEMMA4,
    GLM,
    HARMONY,
    LFM2,
    PYTHONIC,
    family_renderer,
    llama_renderer,
    mistral_renderer,
    tokenizer_with,
    trl_template,
)

Calls = list[tuple[str, dict[str, Any]]]
Verdict = Literal["same", "same or none", "none", "proven"]
Segments = list[int | str]
"""A block: its special tokens, and the text between them."""

SCHEMA = {
    "type": "object",
    "properties": {
        **{key: {"type": "string"} for key in ("path", "content", "command")},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "count": {"type": "integer"},
        "flag": {"type": "boolean"},
        "items": {"type": "array"},
    },
}
TOOLS = (Tool("bash", "", SCHEMA), Tool("write_file", "", SCHEMA))
QUESTION = Message("user", (Text("question"),))

PLAIN = (
    "ls -la",
    "a.py",
    "two words",
    "é ☕",
    "x" * 20,
    "one\ntwo",
    " indented",
    "trailing ",
    "\n\nblank lines\n\n",
    "0",
    "",
)
WILD = (
    *PLAIN,
    "</parameter>",
    "grep '</parameter>' a.xml",
    '<parameter name="a">1</parameter>\n<parameter name="b">2</parameter>',
    "<parameter=path>\nx",
    "</function>",
    "<tool_call>\n</tool_call>",
    "</arg_value><arg_key>path</arg_key>",
    '{"name": "bash", "arguments": {}}',
    "[TOOL_CALLS][ARGS]{}",
    '<|"|>,path:<|"|>',
    'it\'s "quoted" \\ and \\n',
    "```\n```json\n{}",
    "<｜DSML｜parameter>",
    "null",
    "True",
    "12",
)


@dataclass(frozen=True)
class Format:
    """`render` gives the ids of an assistant's message with calls, from its first own token on."""

    renderer: Any
    typed: bool = False  # values are bare text, whose type the schema decides
    closing: int = 1  # number of segments that close a block
    sorts: bool = False  # keys are written in their order
    escapes: bool = False  # strings are Python's: other quotes and more escapes than the template writes

    def render(self, calls: Calls, ids: Sequence[str] = ()) -> list[int]:
        made = tuple(
            ToolCall(ids[at] if ids else f"functions.{name}:{at}", name, json.dumps(arguments, ensure_ascii=False))
            for at, (name, arguments) in enumerate(calls)
        )
        turn = Message("assistant", (), made)
        whole, other = _rendered(self.renderer, turn), _rendered(self.renderer, Message("assistant", (Text("Q"),)))
        start = next(at for at, (a, b) in enumerate(zip(whole, other, strict=False)) if a != b)
        opening = self.renderer.markers.tool_open
        start = whole.index(opening, start) if opening in whole[start:] else start
        end = next((at for at in range(start, len(whole)) if whole[at] in self.renderer.stop_token_ids), len(whole))
        model = self.renderer.tokenizer.convert_tokens_to_ids("<|message_model|>")
        start = whole.index(model, start) if model in whole[start:] else start
        closing = self.renderer.markers.tool_close
        if closing is not None:
            end = len(whole) - whole[::-1].index(closing)
        return whole[start:end]


def _rendered(renderer: Any, turn: Message) -> list[int]:
    if isinstance(renderer, TemplateRenderer):
        return renderer.tokenizer.encode(renderer._text([QUESTION, turn], (), prompt=False, thinking=False))
    rows = [renderer._row(message) for message in (QUESTION, turn)]
    return renderer._by_thinking[False].render_ids(rows, add_generation_prompt=False)


def _template(name: str, *special: str, **config: str) -> Callable[[Path], Any]:
    return lambda folder: TemplateRenderer(tokenizer_with(folder, trl_template(name), *special, **config))


def _family(name: str, *special: str) -> Callable[[Path], Any]:
    return lambda folder: family_renderer(folder, name, *special)


FORMATS: dict[str, tuple[Callable[[Path], Any], dict[str, Any]]] = {
    "qwen3": (_family("qwen3"), {}),
    "qwen3-vl": (_family("qwen3-vl"), {}),
    "qwen3.5": (_family("qwen3.5"), {"typed": True}),
    "qwen3.8": (_family("qwen3.8"), {"typed": True}),
    "prime-qwen3": (_family("prime-qwen3"), {"typed": True}),
    "nemotron-3": (_family("nemotron-3"), {"typed": True}),
    "glm-4.5": (_family("glm-4.5"), {"typed": True}),
    "glm-5": (_family("glm-5"), {"typed": True}),
    "laguna-xs.2": (_family("laguna-xs.2"), {"typed": True}),
    "laguna-xs-2.1": (_family("laguna-xs-2.1"), {"typed": True}),
    "hy3": (_family("hy3"), {"typed": True}),
    "kimi-k2": (_family("kimi-k2"), {}),
    "kimi-k2.5": (_family("kimi-k2.5"), {}),
    "deepseek-v3": (_family("deepseek-v3"), {}),
    "deepseek-v4": (_family("deepseek-v4"), {"closing": 3}),
    "minimax-m2": (_family("minimax-m2"), {"typed": True}),
    "gemma4": (_family("gemma4", '<|"|>'), {"sorts": True}),
    "llama-3": (_family("llama-3"), {"closing": 0}),
    "inkling": (_family("inkling"), {"sorts": True}),
    "gpt-oss": (
        lambda folder: TemplateRenderer(tokenizer_with(folder, trl_template("gptoss"), *HARMONY), "gpt-oss"),
        {},
    ),
    "a Hermes template": (_template("qwen3"), {}),
    "an XML template": (_template("qwen3_5_think"), {"typed": True}),
    "a GLM template": (_template("glm4moe", *GLM), {"typed": True}),
    "a Gemma template": (_template("gemma4_v5", *GEMMA4), {"sorts": True}),
    "an LFM2 template": (_template("lfm2_v2", *LFM2), {"escapes": True}),
    "an LFM2.5 template": (_template("lfm2_2_5", *LFM2), {}),
    "a pythonic template": (
        lambda folder: TemplateRenderer(tokenizer_with(folder, PYTHONIC)),
        {"escapes": True, "closing": 0},
    ),
    "a FunctionGemma template": (
        lambda folder: TemplateRenderer(tokenizer_with(folder, CALLED_WITH_ESCAPES, *FUNCTION_GEMMA)),
        {},
    ),
    "a Llama template": (llama_renderer, {"closing": 0}),
    "Mistral's list": (lambda folder: mistral_renderer(folder, "list"), {"closing": 0}),
    "Mistral's arguments": (lambda folder: mistral_renderer(folder, "args"), {"closing": 0}),
}


_MADE: dict[str, Format] = {}


def make(name: str, folder: Path) -> Format:
    """The format, made once a process: a renderer has no state."""
    if name not in _MADE:
        build, options = FORMATS[name]
        _MADE[name] = Format(build(folder), **options)
    return _MADE[name]


@dataclass(frozen=True)
class Case:
    ids: list[int]
    calls: Calls
    verdict: Verdict
    alteration: str


class Generator:
    """Makes cases of one format."""

    def __init__(self, form: Format, chance: random.Random) -> None:
        self.form = form
        self._chance = chance
        self._tokenizer: HubTokenizer = form.renderer.tokenizer

    def case(self) -> Case:
        alterations = (
            self._whole,
            self._whole_wild,
            self._fuzzed,
            self._fuzzed,
            self._atom_lost,
            self._atom_twice,
            self._key_twice,
            self._word_renamed,
            self._name_broken,
            self._garbage,
            self._two_calls,
            self._json_instead,
            self._cut,
            self._wrong_type,
        )
        return self._chance.choice(alterations)()

    def call_and_ids(self) -> tuple[Calls, list[int]]:
        """A call as it should be, and its block."""
        calls = [self._call(PLAIN, 2)]
        return calls, self.form.render(calls)

    def _call(self, texts: Sequence[str], keys: int | None = None) -> tuple[str, dict[str, Any]]:
        arguments: dict[str, Any] = {}
        for key in self._chance.sample(("path", "content", "command"), keys or self._chance.randrange(1, 4)):
            arguments[key] = self._chance.choice(texts)
        if keys is None and texts is WILD and self._chance.random() < 0.5:
            arguments |= self._chance.choice(
                [
                    {"count": 12},
                    {"flag": True},
                    {"items": ["a", {"b": None, "c": -1.5}]},
                    {"maybe": "12"},
                    {"maybe": None},
                ]
            )
        return self._chance.choice(("bash", "write_file")), arguments

    def _segments(self, ids: Sequence[int]) -> Segments:
        segments: Segments = []
        run: list[int] = []
        for id in [*ids, None]:
            if id is not None and id not in self._tokenizer.special_ids:
                run.append(id)
                continue
            segments += [self._tokenizer.decode(run)] if run else []
            segments += [id] if id is not None else []
            run = []
        return segments

    def _ids(self, segments: Segments) -> list[int]:
        ids: list[int] = []
        for segment in segments:
            guarded = self._tokenizer.guard(segment) if isinstance(segment, str) else ""
            ids += [segment] if isinstance(segment, int) else self._tokenizer.encode(guarded)
        return ids

    def _plain(self, keys: int | None = None) -> tuple[Segments, Calls]:
        calls = [self._call(PLAIN if keys is None else ("alpha", "beta two", "gamma"), keys)]
        return self._segments(self.form.render(calls)), calls

    def _whole(self) -> Case:
        segments, calls = self._plain()
        return Case(self._ids(segments), calls, "same", "whole")

    def _whole_wild(self) -> Case:
        calls = [self._call(WILD)]
        return Case(self.form.render(calls), calls, "same or none", "wild values")

    def _fuzzed(self) -> Case:
        """Characters and tokens are lost, repeated or put elsewhere."""
        segments = self._segments(self.form.render([self._call(self._chance.choice((PLAIN, WILD)))]))
        for _ in range(self._chance.randrange(1, 4)):
            at = self._chance.randrange(len(segments))
            segment = segments[at]
            if isinstance(segment, int):
                segments[at : at + 1] = self._chance.choice([[], [segment, segment], [self._tokenizer.token(segment)]])
            else:
                start = self._chance.randrange(len(segment))
                end = start + self._chance.randrange(1, 12)
                other = self._chance.choice(["", segment[start:end] * 2, self._chance.choice(WILD), "\n", '"', "}"])
                segments[at] = segment[:start] + other + segment[end:]
            segments = [each for each in segments if each != ""]
            if not segments:
                break
        return Case(self._ids(segments), [], "proven", "fuzzed")

    def _atoms(self, segments: Segments) -> list[tuple[int, int, int]]:
        """The places of tags and punctuation: a segment's index, and the characters' in it."""
        places: list[tuple[int, int, int]] = []
        for at, segment in enumerate(segments):
            if isinstance(segment, int):
                places.append((at, 0, 0))
            else:
                found = re.finditer(r"\n?</?[\w:｜]+(?:[ =][^<>\n]*)?>\n?|[{}\[\]():,\"]|```json|```", segment)
                places += [(at, match.start(), match.end()) for match in found]
        return places

    def _atom_lost(self) -> Case:
        segments, calls = self._plain(2)
        at, start, end = self._chance.choice(self._atoms(segments))
        segment = segments[at]
        segments[at : at + 1] = [] if isinstance(segment, int) else [segment[:start] + segment[end:]]
        return Case(self._ids(segments), calls, "same or none", "a tag lost")

    def _atom_twice(self) -> Case:
        segments, calls = self._plain(2)
        at, start, end = self._chance.choice(self._atoms(segments))
        segment = segments[at]
        segments[at : at + 1] = (
            [segment, segment] if isinstance(segment, int) else [segment[:end] + segment[start:end] + segment[end:]]
        )
        return Case(self._ids(segments), calls, "same or none", "a tag twice")

    def _key_twice(self) -> Case:
        segments, calls = self._plain(2)
        first, second = calls[0][1]
        segments = [each if isinstance(each, int) else each.replace(second, first) for each in segments]
        return Case(self._ids(segments), calls, "none", "a key twice")

    def _word_renamed(self) -> Case:
        segments, calls = self._plain(2)
        words = ("arguments", "parameters", "parameter", "function", "invoke", "name", "args", "call:", "functions.")
        present = [word for word in words if any(isinstance(each, str) and word in each for each in segments)]
        if not present:
            return self._whole()
        word, other = self._chance.choice(present), self._chance.choice(("input", "arg", "Function", ""))
        at = next(at for at, each in enumerate(segments) if isinstance(each, str) and word in each)
        segments[at] = str(segments[at]).replace(word, other, 1)
        return Case(self._ids(segments), calls, "same or none", f"{word!r} renamed {other!r}")

    def _name_broken(self) -> Case:
        segments, calls = self._plain()
        name = calls[0][0]
        broken = self._chance.choice(("{}\n{}", "{}\\n{}", "{} {}", "{}\t{}")).format(name[:2], name[2:])
        segments = [each if isinstance(each, int) else each.replace(name, broken) for each in segments]
        return Case(self._ids(segments), calls, "none", "a line break in the name")

    def _garbage(self) -> Case:
        segments, calls = self._plain()
        junk = self._chance.choice(("junk", "}", "\n<x>", "<parameter>", ", and", '{"a": 1}', "]"))
        if self.form.closing == 3:
            segments[-3] = str(segments[-3]).replace("\n</", f"{junk}\n</")
        else:
            segments.insert(len(segments) - self.form.closing, junk)
        return Case(self._ids(segments), calls, "none", f"garbage {junk!r}")

    def _two_calls(self) -> Case:
        """A second call's inner part stands in the block of the first."""
        (first, calls), (second, others) = self._plain(1), self._plain(1)
        if self.form.closing == 3:
            return self._whole()
        if self.form.closing == 0:
            return Case(self._ids(first[:-1] + [f"{first[-1]}{second[-1]}"]), calls, "none", "two calls")
        merged = [*first[:-1], *second[1:-1], first[-1]]
        return Case(self._ids(merged), [*calls, *others], "same or none", "two calls in a block")

    def _json_instead(self) -> Case:
        """JSON stands where the first value and all after it should."""
        segments, calls = self._plain(2)
        key = next(iter(calls[0][1]))
        at = next(at for at, each in enumerate(segments) if isinstance(each, str) and key in each)
        where = str(segments[at]).index(key)
        body = f"{str(segments[at])[:where]}{json.dumps(calls[0][1])}"
        return Case(
            self._ids([*segments[:at], body, *segments[len(segments) - self.form.closing :]]), calls, "none", "JSON"
        )

    def _cut(self) -> Case:
        segments, calls = self._plain()
        ids = self._ids(segments)
        return Case(ids[: self._chance.randrange(1, len(ids))], calls, "same or none", "cut off")

    def _wrong_type(self) -> Case:
        key, value, wrong = self._chance.choice(
            [("count", 12345, "twelve"), ("count", 12345, "1.5"), ("flag", True, "yes"), ("items", ["zz"], "[zz")]
        )
        segments = self._segments(self.form.render([("bash", {"path": "a.py", key: value})]))
        written = {12345: "12345", True: "rue", "['zz']": "zz"}.get(
            value if not isinstance(value, list) else str(value), ""
        )
        if not self.form.typed:
            return self._whole()
        texts = {"count": "12345", "flag": "true", "items": '["zz"]'}
        altered = [
            each if isinstance(each, int) else each.replace(texts[key], wrong).replace("True", wrong)
            for each in segments
        ]
        assert written
        return Case(self._ids(altered), [("bash", {"path": "a.py", key: value})], "none", f"{key} is {wrong!r}")


def served(parsed: ParsedReply) -> Calls | None:
    """The calls of a reply; None if one of its blocks is no call."""
    if any(not call.ok for call in parsed.tool_calls):
        return None
    return [(call.name, json.loads(call.arguments)) for call in parsed.tool_calls]


def fault(form: Format, case: Case) -> str:
    """What is wrong with how the case is read; empty if nothing is."""
    parsed = form.renderer.parse(case.ids, (), TOOLS)
    calls = served(parsed)
    if case.verdict == "same":
        return "" if calls == case.calls else f"{calls} instead of {case.calls}"
    if calls is None and any(call.ok for call in parsed.tool_calls):
        return ""  # the reply is marked, and a broken block beside a call is text
    if not calls:  # without a call, the client reads the sampled text
        text = form.renderer.tokenizer.decode([id for id in case.ids if id not in form.renderer.stop_token_ids])
        is_text = parsed.reasoning is not None or any(call.begun for call in parsed.tool_calls) or parsed.text == text
        return "" if is_text or case.verdict == "proven" else f"the text is {parsed.text!r}"
    if case.verdict == "none":
        return f"{calls} from what is no call"
    if case.verdict == "same or none":
        return "" if calls == case.calls else f"{calls} instead of {case.calls}"
    return "" if _is_proven(form, case, parsed, calls) else f"{calls} does not render as the block"


def _is_proven(form: Format, case: Case, parsed: ParsedReply, calls: Calls) -> bool:
    """Whether the calls and the text of a reply are all that was sampled."""
    decode = form.renderer.tokenizer.decode
    if _squashed("".join(piece.text for piece in parsed.pieces)) != _squashed(decode(case.ids)):
        return False
    sampled = _squashed("".join(piece.text for piece in parsed.pieces if piece.calls is not None))
    rendered = _squashed(decode(form.render(calls, [call.id for call in parsed.tool_calls if call.id])))
    if form.escapes:
        rendered, sampled = (
            re.sub(r"(\\?[\"'])|\\[bf]|\x08", lambda found: "'" if found[1] else "", each)
            for each in (rendered, sampled)
        )
    if rendered != sampled and not (form.sorts and sorted(rendered) == sorted(sampled)):
        return False
    texts = [value for _, arguments in calls for value in arguments.values() if isinstance(value, str)]
    return not form.typed or all(text in decode(case.ids) for text in texts)


def _squashed(text: str) -> str:
    """Without white space, numbers of calls and differences in how JSON writes a character."""
    text = re.sub(r":\d+(?=<\|tool_call_argument_begin)", "", text)
    text = re.sub(r"(?<=commentary)\s*json|<\|call\|>", "", text)  # the kind of content may be left out
    text = text.replace("<|message_model|>", "")  # the first one stands in the prompt
    for python, plain in (("None", "null"), ("True", "true"), ("False", "false")):
        text = text.replace(python, plain)
    return re.sub(r"\s+", "", text.replace("\\/", "/").replace("\\n", "").replace("\\t", ""))


def streamed_fault(form: Format, case: Case, chance: random.Random) -> str:
    """Whether the reply reads otherwise if it comes in pieces."""
    parsed = form.renderer.parse(case.ids, (), TOOLS)
    parser = ReplyParser(form.renderer, (), TOOLS, (), lambda at: f"id{at}")
    left = list(case.ids)
    while left:
        size = chance.randrange(1, 6)
        parser.feed(left[:size])
        left = left[size:]
    _, choice = parser.finish("stop")
    calls = [(call.name, call.arguments) for call in choice.message.tool_calls]
    whole = [(call.name, call.arguments) for call in parsed.tool_calls if call.ok or call.begun]
    same = calls == whole and choice.message.text == parsed.text
    same = same and parser.unparsable == any(not call.ok for call in parsed.tool_calls)
    return "" if same else f"streamed {calls} {choice.message.text!r}, whole {whole} {parsed.text!r}"


def faults(form: Format, count: int, chance: random.Random) -> list[tuple[Case, str]]:
    generator, found = Generator(form, chance), list[tuple[Case, str]]()
    for number in range(count):
        case = generator.case()
        why = fault(form, case) or (streamed_fault(form, case, chance) if number % 10 == 0 else "")
        if why:
            found.append((case, why))
    return found


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("formats", nargs="*", default=[*FORMATS])
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--seed", default="calls")
    options = parser.parse_args(arguments)
    total = 0
    for name in options.formats:
        with tempfile.TemporaryDirectory() as folder:
            start, form = time.monotonic(), make(name, Path(folder))
            found = faults(form, options.calls, random.Random(f"{options.seed} {name}"))
        print(f"{name}: {options.calls} calls, {len(found)} faults, {time.monotonic() - start:.0f} s", flush=True)
        for case, why in found[:5]:
            print(f"  {case.alteration}: {form.renderer.tokenizer.decode(case.ids)!r}\n    {why}")
        total += len(found)
    return 1 if total else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
