"""Makes a conversation fit the model's chat template.

Templates refuse, drop or move messages that real harnesses send: a second system message, two users in a row, a result
beside a text. `find_fitting` audits a renderer once, when its policy starts: it renders the shapes of conversations in
`SHAPES` and finds the rules that make each one fit. The rules are applied in their fixed order (`RULES`) to every
request, and stand on its call.

Invariants (`tests/unit/continuation/test_fit.py`):
- A rule sees only the messages between two replies, and the conversation's beginning. So what an earlier request
  contained fits in the same way in every later one, and a bridge adds only new text.
- No text is dropped. A shape that no rule makes fit is refused by the renderer, in words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import groupby
from operator import is_
from typing import Any, NamedTuple

import msgspec

from rolltap.errors import InvalidRequest
from rolltap.protocols.conversation import Image, Message, Part, Text, Tool, ToolCall
from rolltap.proxy.continuation.forest import with_ids
from rolltap.proxy.continuation.rendering import TokenRenderer, is_object

ADDED_USER = "(no message)"
"""The text of a user message that a template needs and the conversation lacks."""

EMPTY = "(empty)"
"""The text of a message that a template refuses without one."""

NO_RESULT = "(no result)"
"""The text of a result that a template needs and the conversation lacks."""

BETWEEN = "\n\n"
"""Stands between the texts of joined messages."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """Messages that fit, and the names of the rules that changed something. The first `covered` ones are those of the
    caller's first `covered` ones."""

    messages: list[Message]
    rules: tuple[str, ...] = ()
    covered: int = 0


@dataclass(frozen=True, slots=True)
class ShapeResult:
    """What the audit found for a shape. `rules` make it fit; `problem`: what is wrong with it even so ("": nothing)."""

    shape: str
    rules: tuple[str, ...]
    problem: str = ""


Rule = Callable[[list[Message], Message | None], list[Message]]
"""Changes the messages that follow a reply (None: those that begin the conversation)."""


def _is_system(message: Message) -> bool:
    return message.role in ("system", "developer")


def _user(text: str) -> Message:
    return Message("user", (Text(text),))


def _as_user(text: str, result: Message) -> Message:
    """A user's message with a result's text in other words, and its images."""
    return Message("user", (Text(text), *(part for part in result.parts if isinstance(part, Image))))


def _joined(messages: Sequence[Message]) -> Message:
    """One message with the parts and calls of all, which have the same role. Empty texts add nothing."""
    parts: list[Part] = []
    for message in messages:
        if parts and message.text:
            parts.append(Text(BETWEEN if message.role == "assistant" else ""))
        parts += message.parts
    calls = tuple(call for message in messages for call in message.tool_calls)
    return Message(messages[0].role, tuple(parts), calls, is_error=any(message.is_error for message in messages))


def _joined_neighbours(messages: list[Message], role: str) -> list[Message]:
    out: list[Message] = []
    for is_role, group in groupby(messages, lambda message: message.role == role):
        neighbours = list(group)
        out += [_joined(neighbours)] if is_role and len(neighbours) > 1 else neighbours
    return out


def _runs(messages: list[Message]) -> Iterator[tuple[list[Message], list[Message]]]:
    """The conversation as (assistant messages, the other messages up to the next assistant message)."""
    turn: list[Message] = []
    others: list[Message] = []
    for message in messages:
        if message.role != "assistant":
            others.append(message)
            continue
        if others:
            yield turn, others
            turn, others = [], []
        turn.append(message)
    yield turn, others


def _calls_as_text(messages: list[Message], reply: Message | None) -> list[Message]:
    out: list[Message] = []
    for message in messages:
        if message.role == "tool":
            message = _as_user(f"<tool_response>\n{message.text}\n</tool_response>", message)
        elif message.tool_calls:
            blocks = [
                f'<tool_call>\n{{"name": "{call.name}", "arguments": {call.arguments or "{}"}}}\n</tool_call>'
                for call in message.tool_calls
            ]
            text = "\n".join([*([message.text] if message.text else []), *blocks])
            parts = tuple(part for part in message.parts if not isinstance(part, Text))
            message = Message("assistant", (*parts, Text(text)))
        out.append(message)
    return out


def _lead(messages: list[Message], reply: Message | None) -> int:
    """The number of system messages that begin the conversation."""
    if reply is not None:
        return 0
    return next((at for at, message in enumerate(messages) if not _is_system(message)), len(messages))


def _system_folded(messages: list[Message], reply: Message | None) -> list[Message]:
    lead = _lead(messages, reply)
    if lead < 2:
        return messages
    text = BETWEEN.join(message.text for message in messages[:lead] if message.text)
    return [Message("system", (Text(text),)), *messages[lead:]]


def _system_as_user(messages: list[Message], reply: Message | None) -> list[Message]:
    lead = _lead(messages, reply)
    return [*(msgspec.structs.replace(message, role="user") for message in messages[:lead]), *messages[lead:]]


def _system_in_turn(messages: list[Message], reply: Message | None) -> list[Message]:
    lead = _lead(messages, reply)
    later = (msgspec.structs.replace(m, role="user") if _is_system(m) else m for m in messages[lead:])
    return [*messages[:lead], *later]


def _results_as_text(messages: list[Message], reply: Message | None) -> list[Message]:
    """Results that answer no call of the reply before them become a user's text."""
    out: list[Message] = []
    turn = [reply] if reply is not None else []
    for message in messages:
        if message.role == "assistant":
            turn = [*turn, message] if out and out[-1].role == "assistant" else [message]
        elif message.role == "tool" and all(
            call.id != message.tool_call_id for each in turn for call in each.tool_calls
        ):
            message = _as_user(f"[result of {message.name or 'a tool'}]\n{message.text}", message)
        out.append(message)
    return out


def _results_first(messages: list[Message], reply: Message | None) -> list[Message]:
    """The results of a reply's calls stand directly behind it; texts between them follow."""
    out: list[Message] = []
    for turn, others in _runs(messages):
        out += [*turn, *(m for m in others if m.role == "tool"), *(m for m in others if m.role != "tool")]
    return out


def _results_sorted(messages: list[Message], reply: Message | None) -> list[Message]:
    """The results of a turn have the order of its calls."""
    order = {call.id: at for at, call in enumerate(reply.tool_calls if reply is not None else ())}
    out: list[Message] = []
    for turn, others in _runs(messages):
        order |= {call.id: at for at, call in enumerate(call for message in turn for call in message.tool_calls)}
        results = iter(
            sorted((m for m in others if m.role == "tool"), key=lambda m: order.get(m.tool_call_id or "", 0))
        )
        out += [*turn, *(next(results) if message.role == "tool" else message for message in others)]
    return out


def _text_in_result(messages: list[Message], reply: Message | None) -> list[Message]:
    """A user's text that follows results is a part of the last result."""
    out: list[Message] = []
    for message in messages:
        if message.role == "user" and out and out[-1].role == "tool":
            last = out.pop()
            message = msgspec.structs.replace(last, parts=(*last.parts, Text(""), *message.parts))
        out.append(message)
    return out


def _calls_one_by_one(messages: list[Message], reply: Message | None) -> list[Message]:
    """Each call of a turn is a message of its own, with its result behind it."""
    out: list[Message] = []
    for turn, others in _runs(messages):
        if all(len(message.tool_calls) < 2 for message in turn):
            out += [*turn, *others]
            continue
        results = {message.tool_call_id: message for message in reversed(others) if message.role == "tool"}
        answered: list[Message] = []
        for message in turn:
            calls = [msgspec.structs.replace(message, parts=(), tool_calls=(call,)) for call in message.tool_calls]
            if calls:
                calls[0] = msgspec.structs.replace(message, tool_calls=message.tool_calls[:1])
            for part in calls or [message]:
                out.append(part)
                if part.tool_calls and (result := results.get(part.tool_calls[0].id)) is not None:
                    out.append(result)
                    answered.append(result)
        out += [message for message in others if not any(message is result for result in answered)]
    return out


def _results_added(messages: list[Message], reply: Message | None) -> list[Message]:
    """Calls that were never answered have a result that says so."""
    out: list[Message] = []
    turn = [reply] if reply is not None else []
    for own_turn, others in _runs(messages):
        turn = own_turn or turn
        answered = {message.tool_call_id for message in others if message.role == "tool"}
        lacking = [call for message in turn for call in message.tool_calls if call.id not in answered]
        out += own_turn
        if others:  # else the conversation ends, or goes on with the same turn
            out += [Message("tool", (Text(NO_RESULT),), tool_call_id=call.id, name=call.name) for call in lacking]
        out += others
        turn = []
    return out


def _text_left_out(messages: list[Message], reply: Message | None) -> list[Message]:
    """Text beside calls is left out, as the template does."""
    return [
        msgspec.structs.replace(message, parts=tuple(part for part in message.parts if not isinstance(part, Text)))
        if message.tool_calls and message.text
        else message
        for message in messages
    ]


def _text_apart(messages: list[Message], reply: Message | None) -> list[Message]:
    """A turn's text is a message before the one with its calls."""
    out: list[Message] = []
    for message in messages:
        if message.tool_calls and message.text.strip():
            out.append(msgspec.structs.replace(message, tool_calls=()))
            message = msgspec.structs.replace(message, parts=())
        out.append(message)
    return out


def _arguments_as_object(messages: list[Message], reply: Message | None) -> list[Message]:
    """Arguments that a client sends back as text, since they were cut off, are an object with this text."""

    def with_object(call: ToolCall) -> ToolCall:
        if call.kind == "custom" or is_object(call.arguments):
            return call
        return msgspec.structs.replace(call, arguments=json.dumps({"arguments": call.arguments}, ensure_ascii=False))

    return [
        msgspec.structs.replace(message, tool_calls=calls) if calls != message.tool_calls else message
        for message in messages
        for calls in [tuple(map(with_object, message.tool_calls))]
    ]


def _text_added(messages: list[Message], reply: Message | None) -> list[Message]:
    """Messages without text and calls say that they are empty."""
    return [
        message
        if message.text or message.tool_calls or any(isinstance(part, Image) for part in message.parts)
        else msgspec.structs.replace(message, parts=(Text(EMPTY),))
        for message in messages
    ]


def _user_added(messages: list[Message], reply: Message | None) -> list[Message]:
    lead = _lead(messages, reply)
    if reply is not None or any(message.role == "user" for message in messages[lead : lead + 1]):
        return messages
    return [*messages[:lead], _user(ADDED_USER), *messages[lead:]]


RULES: dict[str, tuple[str, Rule]] = {
    "arguments_as_object": ("arguments that are no JSON object are one with their text", _arguments_as_object),
    "calls_as_text": ("the template has no tool calls: calls and results are text", _calls_as_text),
    "system_folded": ("several system messages at the beginning are one", _system_folded),
    "system_as_user": ("the template has no system message: it is the first user message", _system_as_user),
    "system_in_turn": ("a system message after the beginning is a user message in its place", _system_in_turn),
    "results_as_text": ("a result without a call in the turn before it is a user message", _results_as_text),
    "results_added": (f"a call that was never answered has the result {NO_RESULT!r}", _results_added),
    "results_first": ("results stand directly behind their calls", _results_first),
    "results_sorted": ("results have the order of their calls", _results_sorted),
    "text_in_result": ("text that follows results is a part of the last one", _text_in_result),
    "users_joined": ("user messages in a row are one", lambda all_, _: _joined_neighbours(all_, "user")),
    "assistants_joined": ("assistant messages in a row are one", lambda all_, _: _joined_neighbours(all_, "assistant")),
    "calls_one_by_one": ("parallel calls are a turn each, with its result", _calls_one_by_one),
    "text_apart": ("text beside calls is a message of its own", _text_apart),
    "text_left_out": ("the template has no text beside calls: it is left out", _text_left_out),
    "text_added": (f"a message without text says {EMPTY!r}", _text_added),
    "user_added": (f"a user message {ADDED_USER!r} stands before a conversation that has none there", _user_added),
}
"""The rules in the order in which they are applied: what each does, and its function."""

IDS_IN_FORM = "ids_in_form"
IdForm = Callable[[ToolCall, int], str]
"""The id that a template wants for a call and its number in the conversation."""


def _functions_id(call: ToolCall, number: int) -> str:
    """Kimi's form, from which the template's reader takes the tool's name."""
    return (
        call.id
        if re.fullmatch(rf"(functions\.)?{re.escape(call.name)}:\d+", call.id)
        else f"functions.{call.name}:{number}"
    )


def _nine_characters(call: ToolCall, number: int) -> str:
    """Mistral's form: nine letters and digits. Equal ids stay equal, also in another request."""
    return (
        call.id
        if re.fullmatch(r"[a-zA-Z0-9]{9}", call.id)
        else blake2b(call.id.encode(), digest_size=5).hexdigest()[:9]
    )


ID_FORMS: dict[str, IdForm] = {"functions.NAME:N": _functions_id, "nine characters": _nine_characters}


@dataclass(frozen=True, slots=True)
class Fitting:
    """How conversations are made to fit one template: its `rules` in their order, and the form of its call ids ("":
    any). `table` has the audit's results. `shows_tools`: whether the template writes the tools that a request offers.
    """

    rules: tuple[str, ...] = ()
    id_form: str = ""
    shows_tools: bool = True
    table: tuple[ShapeResult, ...] = field(default=(), compare=False)

    def whole(self, messages: Sequence[Message], covered: int = 0) -> Fitted:
        """A whole conversation. Its message before `covered`, if any, is a reply."""
        rows = self._with_ids(messages) if self.id_form else list(messages)
        rules = [] if all(map(is_, rows, messages)) else [IDS_IN_FORM]
        history, history_rules = self._apply(rows[:covered], None) if covered else ([], ())
        new, new_rules = self._apply(rows[covered:], rows[covered - 1] if covered else None)
        return Fitted([*history, *new], merged(rules, history_rules, new_rules), len(history))

    def new(self, messages: Sequence[Message], reply: Message) -> Fitted:
        """The messages that follow `reply`; none of them is a reply."""
        named_reply, *rows = self._with_ids([reply, *messages]) if self.id_form else [reply, *messages]
        fitted, rules = self._apply(rows, named_reply)
        return Fitted(fitted, rules)

    def _apply(self, messages: list[Message], reply: Message | None) -> tuple[list[Message], tuple[str, ...]]:
        applied: list[str] = []
        for name in self.rules:
            fitted = RULES[name][1](messages, reply)
            if len(fitted) != len(messages) or not all(map(is_, fitted, messages)):
                messages = fitted
                applied.append(name)
        return messages, tuple(applied)

    def _with_ids(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with ids in the template's form. A call id may repeat in a later turn."""
        form, ids, number = ID_FORMS[self.id_form], dict[str, str](), 0
        for message in messages:
            for call in message.tool_calls:
                ids.setdefault(call.id, form(call, number))
                number += 1
            if message.role == "tool" and (given := message.tool_call_id or "") not in ids:
                ids[given] = form(ToolCall(given, message.name or "tool", ""), number)
        return with_ids(messages, ids)


_LOOK = Tool("look", "Looks something up.", {"type": "object", "properties": {"name": {"type": "string"}}})
_TOOLS = (_LOOK,)
_FIRST = ToolCall("call_0123456789abcdef", "look", '{"name": "foxtrot"}')
_SECOND = ToolCall("call_fedcba9876543210", "look", '{"name": "golf"}')
_BROKEN = ToolCall("call_0000", "look", '{"name": ')


def _system(word: str) -> Message:
    return Message("system", (Text(word),))


def _turn(word: str, *calls: ToolCall) -> Message:
    return Message("assistant", (Text(word),) if word else (), calls)


def _result(word: str, call: ToolCall = _FIRST) -> Message:
    return Message("tool", (Text(word),), tool_call_id=call.id, name=call.name)


_ASKED = (_user("alfa"),)
_REPLIED = (*_ASKED, _turn("bravo"))
_CALLED = (*_ASKED, _turn("", _FIRST))

SHAPES: dict[str, tuple[Message, ...]] = {
    "call and result": (*_CALLED, _result("charlie")),
    "system message": (_system("alfa"), _user("bravo")),
    "system message, then a call": (_system("alfa"), _user("bravo"), _turn("", _FIRST), _result("charlie")),
    "several system messages": (_system("alfa"), _system("bravo"), _system("charlie"), _user("delta")),
    "system after user": (_system("alfa"), _user("bravo"), _system("charlie")),
    "system between turns": (*_REPLIED, _system("charlie"), _user("delta")),
    "system at the end": (*_REPLIED, _system("charlie")),
    "system before result": (*_CALLED, _system("charlie"), _result("delta")),
    "system after result": (*_CALLED, _result("charlie"), _system("delta")),
    "result without call": (*_ASKED, _result("bravo"), _user("charlie")),
    "result after a later turn": (*_CALLED, _user("charlie"), _turn("delta"), _result("echo")),
    "user before result": (*_CALLED, _user("charlie"), _result("delta")),
    "user after result": (*_CALLED, _result("charlie"), _user("delta")),
    "users in a row": (_user("alfa"), _user("bravo")),
    "users in a row, later": (*_REPLIED, _user("charlie"), _user("delta")),
    "assistants in a row": (*_REPLIED, _turn("charlie"), _user("delta")),
    "assistants in a row, with a call": (*_REPLIED, _turn("", _FIRST), _result("charlie")),
    "assistant at the end": _REPLIED,
    "parallel calls": (*_ASKED, _turn("", _FIRST, _SECOND), _result("bravo"), _result("charlie", _SECOND)),
    "results out of order": (*_ASKED, _turn("", _FIRST, _SECOND), _result("bravo", _SECOND), _result("charlie")),
    "call without result": (*_ASKED, _turn("", _FIRST, _SECOND), _result("bravo"), _user("charlie")),
    "text beside a call": (*_ASKED, _turn("bravo", _FIRST), _result("charlie")),
    "text beside a call, then a reply": (
        *_ASKED,
        _turn("bravo", _FIRST),
        _result("charlie"),
        _turn("delta"),
        _user("echo"),
    ),
    "assistant first": (_turn("alfa"), _user("bravo")),
    "system, then assistant": (_system("alfa"), _turn("bravo"), _user("charlie")),
    "system alone": (_system("alfa"),),
    "result first": (_result("alfa"),),
    "arguments that are no object": (*_ASKED, _turn("", _BROKEN), _result("bravo", _BROKEN)),
    "empty user message": (_user(""),),
    "empty assistant message": (*_ASKED, _turn(""), _user("bravo")),
    "empty result": (*_CALLED, _result("")),
}
"""The shapes of conversations that harnesses send. Every text is a word that no template contains."""


TRIED = (
    "system_folded",
    "system_in_turn",
    "users_joined",
    "assistants_joined",
    "user_added",
    "arguments_as_object",
    "results_first",
    "results_as_text",
    "results_added",
    "results_sorted",
    "text_in_result",
    "calls_one_by_one",
    "text_apart",
    "text_left_out",
    "text_added",
    "system_as_user",
    "calls_as_text",
)
"""The rules in the order in which the audit tries them: those that change less come first."""


def find_fitting(renderer: TokenRenderer) -> Fitting:
    """Audits a renderer: finds the form of its call ids, and the rules that make the shapes fit.

    A rule is kept if more shapes fit with it, and none fits no longer.
    """
    audit = _Audit(renderer)
    fitting = Fitting(id_form=audit.id_form())
    problems = audit.problems(fitting)
    before: dict[str, ShapeProblem] = {}
    while problems and problems != before:  # a rule may help only beside a later one
        before = problems
        for name in TRIED:
            if not problems or name in fitting.rules or (name == "calls_as_text" and "call and result" not in problems):
                continue
            tried = replace(fitting, rules=merged(fitting.rules, (name,)))
            left = audit.problems(tried)
            if left.keys() < problems.keys() and not any(
                problem.is_refused and not problems[shape].is_refused for shape, problem in left.items()
            ):
                fitting, problems = tried, left
    table = tuple(
        ShapeResult(shape, fitting.whole(messages).rules, problems[shape].text if shape in problems else "")
        for shape, messages in SHAPES.items()
    )
    return replace(fitting, table=table, shows_tools=audit.shows_tools(fitting))


def merged(*rules: Collection[str]) -> tuple[str, ...]:
    """The names of all the rules, once each and in their order."""
    named = set().union(*rules)
    return tuple(name for name in (IDS_IN_FORM, *RULES) if name in named) if named else ()


class ShapeProblem(NamedTuple):
    """Why a shape does not fit. `is_refused`: the template refuses it."""

    text: str
    is_refused: bool = False


class _Audit:
    """What a renderer makes of the shapes. Most rules change few of them, so each rendering and bridge is made once."""

    def __init__(self, renderer: TokenRenderer) -> None:
        self._renderer = renderer
        self._renderings: dict[tuple[tuple[Message, ...], bool], list[int] | InvalidRequest] = {}
        self._bridges: dict[tuple[Any, ...], list[int] | None] = {}

    def problems(self, fitting: Fitting) -> dict[str, ShapeProblem]:
        """What is wrong with each shape that does not fit."""
        problems = {shape: self._problem(fitting, messages) for shape, messages in SHAPES.items()}
        return {shape: problem for shape, problem in problems.items() if problem.text}

    def id_form(self) -> str:
        """The form of call ids that the template wants: one that it takes, if it refuses ours, or the one from which it
        reads the tool's name, if it writes ids in the names' place."""
        for form in ("", *ID_FORMS):
            fitting = Fitting(id_form=form)
            try:
                self._render(fitting, SHAPES["call and result"], tools=False)
                turn = self._text(self._render(fitting, _CALLED, tools=False))
            except InvalidRequest:
                continue
            if form or _FIRST.name in turn or _FIRST.id not in turn:
                return form
        return ""

    def shows_tools(self, fitting: Fitting) -> bool:
        try:
            return _LOOK.name in self._text(self._render(fitting, SHAPES["system message"]))
        except InvalidRequest:
            return False

    def _problem(self, fitting: Fitting, messages: Sequence[Message]) -> ShapeProblem:
        """Why the messages do not fit: refused, a text is missing, a system message moved, or no bridge ("": they
        fit)."""
        has_calls = any(message.tool_calls or message.role == "tool" for message in messages)
        for tools in (True,) if has_calls else (True, False):
            try:
                ids = self._render(fitting, messages, tools=tools)
            except InvalidRequest as error:
                return ShapeProblem(error.message, is_refused=True)
            if problem := _lost(fitting, messages, self._text(ids)):
                return ShapeProblem(problem)
        at = next((at for at in range(len(messages), 0, -1) if messages[at - 1].role == "assistant"), 0)
        return ShapeProblem(self._unbridged(fitting, messages, at) if 1 < at < len(messages) else "")

    def _unbridged(self, fitting: Fitting, messages: Sequence[Message], covered: int) -> str:
        """Whether what follows the reply before `covered` breaks a bridge that a plain message of its kind has."""
        history, reply, new = messages[: covered - 1], messages[covered - 1], messages[covered:]
        results = [message for message in new if message.role == "tool"]
        if "calls_one_by_one" in fitting.rules and len(reply.tool_calls) > 1:
            return ""  # the model makes no such turn
        try:
            prompt = self._render(fitting, history)
        except InvalidRequest:
            return ""  # no such reply can have been sampled
        markers = self._renderer.markers
        closing = markers.reasoning_close if markers.opens_in_reasoning(prompt) else None
        turn = [*([closing] if closing is not None else []), *self._renderer.tokenizer.encode("reply")]

        def bridged(added: Sequence[Message], stop: int) -> str | None:
            answered = {message.tool_call_id for message in added}
            calls = tuple(call for call in reply.tool_calls if call.id in answered or added is new)
            fitted = fitting.new(added, msgspec.structs.replace(reply, tool_calls=calls)).messages
            ids = self._bridge(prompt, [*turn, stop], fitted)
            return None if ids is None else self._text(ids[len(prompt) :])

        plain = results[:1] or [_user("charlie")]
        stop = next((stop for stop in self._renderer.stop_token_ids if bridged(plain, stop) is not None), None)
        if stop is None:
            return ""
        text = bridged(new, stop)
        if text is None:
            return "the template does not bridge it"
        whole = self._text(self._render(fitting, messages))
        words = [_word(message) for message in results]
        if sorted(words, key=text.find) != sorted(words, key=whole.find):
            return "the template sorts results"
        return _lost(fitting, new, text)

    def _render(self, fitting: Fitting, messages: Sequence[Message], *, tools: bool = True) -> list[int]:
        fitted = fitting.whole(messages).messages
        key = tuple(fitted), tools
        if key not in self._renderings:
            try:
                self._renderings[key] = self._renderer.render(fitted, _TOOLS if tools else (), thinking=True)
            except InvalidRequest as error:
                self._renderings[key] = error
        rendering = self._renderings[key]
        if isinstance(rendering, InvalidRequest):
            raise rendering
        return rendering

    def _bridge(self, prompt: list[int], output: list[int], new: list[Message]) -> list[int] | None:
        key = tuple(prompt), tuple(output), tuple(new)
        if key not in self._bridges:
            self._bridges[key] = self._renderer.bridge(prompt, output, new, _TOOLS, thinking=True)
        return self._bridges[key]

    def _text(self, ids: Sequence[int]) -> str:
        return self._renderer.tokenizer.decode(ids)


def _lost(fitting: Fitting, messages: Sequence[Message], text: str) -> str:
    """Which message's text a rendering lacks, or which system message is not in its place."""
    leaves_out = "text_left_out" in fitting.rules
    words = [(m, _word(m)) for m in messages if m.text and not (leaves_out and m.role == "assistant")]
    places = [text.find(word) for _, word in words]
    for index, (message, word) in enumerate(words):
        if places[index] < 0:
            return f"the template leaves out the text of the {message.role} message ({word})"
        later = [at for at, (other, _) in enumerate(words) if at > index and other.role != "tool"]
        if _is_system(message) and any(place > places[index] for place in places[:index]):
            return "the template moves the system message to the front"
        if _is_system(message) and any(places[at] < places[index] for at in later):
            return "the template moves the system message to the end"
    words = ("foxtrot", "golf")
    arguments = "".join(call.arguments for message in messages for call in message.tool_calls)
    return "the template leaves out a call" if any(word in arguments and word not in text for word in words) else ""


def _word(message: Message) -> str:
    return message.text.rpartition("\n")[2]
