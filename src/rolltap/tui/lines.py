"""Sessions, calls, messages and tokens as text for a terminal. Control characters of recorded text are made visible."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal

from rich.text import Text

from rolltap.cli.screen import visible
from rolltap.reading.types import CallLine, CallTokens, CallTurn, MessageView, PartView, SessionSummary, TokenView

Colouring = Literal["mask", "log-prob", "version"]
COLOURINGS: tuple[Colouring, ...] = ("mask", "log-prob", "version")
UNLIKELY = ((-0.1, "green"), (-1.0, "yellow"), (-3.0, "dark_orange"))
"""Log-probs above the bound have the colour; those below all of them are red."""
VERSION_COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red")
SESSION_COLUMNS = ("session", "harness", "policy", "calls", "tokens", "breaks", "reward", "last call")
TOKEN_COLUMNS = ("#", "id", "text", "", "log-prob", "version")
SHOWN_CHARS = 4000
"""Of a part of a message; the whole is in the viewer and in `rolltap export`."""


def plain(text: str) -> Text:
    """Recorded text as text: nothing in it is markup or a control character."""
    return Text(visible(text))


def session_row(session: SessionSummary) -> list[Text]:
    reward = "" if session.reward is None else f"{session.reward:g}"
    last = "" if session.last_call_at is None else time.strftime("%m-%d %H:%M", time.localtime(session.last_call_at))
    tokens = f"{session.prompt_tokens:,} + {session.output_tokens:,}"
    values = [
        session.id,
        session.harness,
        session.policy,
        str(session.calls),
        tokens,
        str(session.breaks),
        reward,
        last,
    ]
    return [plain(value) for value in values]


def call_text(call: CallLine) -> Text:
    """A call's head: its kind, tokens, outcome, break, and why it carries no loss."""
    text = Text.assemble((f" {call.kind} ", "reverse"), f" {call.id[-6:]}  ")
    text.append(f"{call.prompt_tokens:,} + {call.output_tokens:,} tokens", "bold")
    if call.shared:
        text.append(f", continues {call.shared:,}")
    if call.outcome != "completed":
        text.append(f", {call.outcome}", "red")
    if call.mask:
        text.append(f", not trained: {visible(call.mask)}", "yellow")
    if call.break_ is not None:
        text.append(f"\nbreak: {call.break_.reason} at token {call.break_.token_index:,}", "bold red")
    if call.error:
        text.append(f"\n{visible(call.error)}", "red")
    return text


def turn_text(call: CallLine, turn: CallTurn | None) -> Text:
    """What a call added to the conversation."""
    text = call_text(call)
    if turn is not None:
        for message in turn.new:
            _append_message(text, message)
        if turn.reply is not None:
            _append_message(text, turn.reply)
    return text


def _append_message(text: Text, message: MessageView) -> None:
    text.append(f"\n\n{visible(message.role)}", "bold cyan" if message.role == "assistant" else "bold")
    if message.is_error:
        text.append(" (error)", "red")
    for part in message.parts:
        _append_part(text, part)


def _append_part(text: Text, part: PartView) -> None:
    hidden_chars = len(part.text) - SHOWN_CHARS
    content = visible(part.text[:SHOWN_CHARS]) + (f"\n[{hidden_chars:,} more characters]" if hidden_chars > 0 else "")
    match part.kind:
        case "thinking":
            text.append(f"\n{content}", "italic grey62")
        case "tool_call":
            text.append(f"\n→ {visible(part.name)} ", "bold magenta").append(content)
        case "image":
            text.append("\n[image]", "grey62")
        case _:
            text.append(f"\n{content}")


def tokens_head(call: CallLine, tokens: CallTokens, colouring: Colouring) -> Text:
    text = call_text(call)
    last = tokens.start + len(tokens.tokens)
    text.append(f"\ntokens {tokens.start:,} to {last:,} of {tokens.total:,}, coloured by {colouring}", "grey62")
    if not tokens.vocabulary:
        text.append("; no tokenizer is known, so they have no text", "grey62")
    return text


def token_row(token: TokenView, call: CallLine, colouring: Colouring) -> list[Text]:
    """A token's position, id, text, origin, log-prob and version. The one at which a break begins says so."""
    origin = "sampled" if token.sampled else "shared" if token.shared else "new"
    if token.trained:
        origin = "trained"
    if call.break_ is not None and call.break_.token_index == token.index:
        origin += " ◀ break"
    logprob = "" if token.logprob is None else f"{token.logprob:.4f}"
    version = "" if token.version is None else str(token.version)
    text = visible(token.text).replace("\n", "\\n").replace("\t", "\\t")
    style = _style(token, colouring)
    return [Text(value, style) for value in (str(token.index), str(token.id), text, origin, logprob, version)]


def _style(token: TokenView, colouring: Colouring) -> str:
    if colouring == "mask":
        return "green" if token.trained else "yellow" if token.sampled else "grey62"
    if colouring == "version":
        return "grey62" if token.version is None else VERSION_COLOURS[token.version % len(VERSION_COLOURS)]
    if token.logprob is None:
        return "grey62"
    return next((colour for bound, colour in UNLIKELY if token.logprob >= bound), "red")


def unlikely(tokens: Sequence[TokenView]) -> int | None:
    """The place in `tokens` of the one with the least log-prob; None where none was sampled."""
    sampled = [(token.logprob, place) for place, token in enumerate(tokens) if token.logprob is not None]
    return min(sampled)[1] if sampled else None
