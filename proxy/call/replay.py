"""A recorded session answers a harness that runs again: at no engine's cost, in the harness's own protocol.

The session's `Recording` finds the recorded call with the same request. The sampling and the model must be the same,
too. The first request that is not on record is refused, and the error holds both sides. Replayed calls are recorded in
their own session like any other, with the tokens of the recorded ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rolltap.calllog.facts import CallRow
from rolltap.decoding import convert, from_json
from rolltap.errors import ReplayDiffers
from rolltap.protocols.conversation import (
    ChatRequest,
    Choice,
    Message,
    Reasoning,
    ReasoningDelta,
    ReplyEvent,
    Text,
    TextDelta,
    ToolCallDelta,
    ToolCallEnded,
    ToolCallStarted,
    Usage,
)
from rolltap.protocols.handles import Handles
from rolltap.proxy.call.in_flight import manner_of
from rolltap.proxy.call.open_call import OpenCall
from rolltap.proxy.call.policy import Policy
from rolltap.proxy.continuation.plan import PromptPlan

SHOWN_LINES = 40
LINE_CHARACTERS = 400


def check_same(row: CallRow, request: ChatRequest, plan: PromptPlan, *, knows_prompt: bool) -> None:
    """Raises `ReplayDiffers` if a call asks for other sampling than the recorded one with the same messages, or if its
    prompt has other tokens."""
    recorded, asked = dict(row.intent.sampling_asked), msgspec.to_builtins(request.sampling)
    sides = [{name: value for name, value in side.items() if name != "seed"} for side in (recorded, asked)]
    texts = [msgspec.json.encode(side, order="sorted").decode() for side in sides]
    if texts[0] != texts[1]:
        raise ReplayDiffers(f"call {row.intent.id}: other sampling\n- {texts[0]}\n+ {texts[1]}")
    if row.intent.shape.manner != manner_of(request):
        message = f"call {row.intent.id}: another model, or streamed otherwise"
        raise ReplayDiffers(f"{message}\n- {row.intent.shape.manner}\n+ {manner_of(request)}")
    if knows_prompt and plan.prompt_ids.tolist() != row.prompt_ids.tolist():
        pairs = zip(plan.prompt_ids.tolist(), row.prompt_ids.tolist(), strict=False)
        same = next((at for at, (one, other) in enumerate(pairs) if one != other), "the end of the shorter one")
        raise ReplayDiffers(
            f"call {row.intent.id}: the harness sends the same, and the prompt has other tokens from {same} on: the "
            "policy's tokenizer, template or settings have changed since"
        )


def answer(call: OpenCall, row: CallRow, request: ChatRequest, policy: Policy, handles: Handles) -> list[ReplyEvent]:
    """Fills in the call from the recorded one; returns the reply's events."""
    done = row.completion
    assert done is not None
    message = from_json(done.message, Message)
    tool_calls = tuple(
        msgspec.structs.replace(each, id=handles.mint(call.id, position))
        for position, each in enumerate(message.tool_calls)
    )
    message = msgspec.structs.replace(message, tool_calls=tool_calls)
    sampled = call.sampled
    sampled.ids, sampled.logprobs = done.output_ids.tolist(), done.logprobs.tolist()
    sampled.missing, sampled.versions = len(sampled.logprobs) != len(sampled.ids), done.versions or None
    sampled.extras = {name: [array] for name, array in done.extras.items()}
    logprobs = None
    if request.sampling.logprobs:
        logprobs = policy.source.token_logprobs(sampled.ids, sampled.logprobs)
    call.choice = Choice(message, done.finish.value, logprobs=logprobs, index=call.index)  # type: ignore[arg-type]
    call.flaw, call.complete = done.flaw, True
    if not len(call.prompt):
        call.usage = convert(done.usage, Usage)
    return list(_events(message, call.index))


def _events(message: Message, index: int) -> list[ReplyEvent]:
    events: list[ReplyEvent] = []
    for part in message.parts:
        if isinstance(part, Reasoning):
            events.append(ReasoningDelta(part.text, index))
        elif isinstance(part, Text):
            events.append(TextDelta(part.text, index))
    for position, each in enumerate(message.tool_calls):
        events += [
            ToolCallStarted(position, each.id, each.name, each.kind, index),
            ToolCallDelta(position, each.arguments, index),
            ToolCallEnded(position, index),
        ]
    return events


def differs(number: int, recorded: ChatRequest | None, sent: ChatRequest) -> ReplayDiffers:
    """The error for a request that is not on record. `recorded`: the request that was expected; None: there is none."""
    if recorded is None:
        last = _lines(sent)[-SHOWN_LINES:]
        text = "\n".join(f"+ {line[:LINE_CHARACTERS]}" for line in last)
        return ReplayDiffers(f"call {number}: the record has no more calls, and the harness makes one:\n{text}")
    if recorded.previous:  # its messages are those after the reply that it names
        sent = msgspec.structs.replace(sent, messages=sent.messages[-len(recorded.messages) :])
    return ReplayDiffers(f"call {number}: the harness sends something else\n{text_difference(recorded, sent)}")


def text_difference(recorded: ChatRequest, sent: ChatRequest) -> str:
    """The first lines in which two requests differ: of the record with `-`, sent now with `+`."""
    before, after = _lines(recorded), _lines(sent)
    same = _common(before, after)
    heading = next((line for line in reversed(before[:same]) if line.startswith("[")), "")
    context = before[max(0, same - 2) : same]
    left, right = before[same:], after[same:]
    while left and right and left[-1] == right[-1]:
        left, right = left[:-1], right[:-1]
    if not left and not right:
        return "  they differ in what is not shown: thinking, images, ids"
    begin = max(0, _common(left[0], right[0]) - LINE_CHARACTERS // 4) if left and right else 0
    known = [heading, *context] if heading and heading not in context else context
    lines = [f"  {line[:LINE_CHARACTERS]}" for line in known]
    for sign, side in (("-", left), ("+", right)):
        for number, line in enumerate(side[:SHOWN_LINES]):
            first = begin if number == 0 else 0
            cut = line[first : first + LINE_CHARACTERS]
            lines.append(f"{sign} {'[...] ' if first else ''}{cut}{' [...]' if first + len(cut) < len(line) else ''}")
        if len(side) > SHOWN_LINES:
            lines.append(f"{sign} [{len(side) - SHOWN_LINES:,} more lines]")
    return "\n".join(lines)


def _common(one: Sequence[str], other: Sequence[str]) -> int:
    """The number of leading lines, or characters, that are the same."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (left, right) in enumerate(pairs) if left != right), min(len(one), len(other)))


def _lines(request: ChatRequest) -> list[str]:
    """A request as lines: the tools, then each message under a heading."""
    lines = [f"tool {tool.name}: {msgspec.json.encode(tool, order='sorted').decode()}" for tool in request.tools]
    for number, message in enumerate(request.messages, 1):
        lines.append(f"[message {number}: {message.role}]")
        lines += message.described.splitlines()
        lines += [f"{each.name}({each.arguments})" for each in message.tool_calls]
    return lines
