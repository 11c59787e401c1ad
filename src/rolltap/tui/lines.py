"""Sessions, calls, messages and tokens as text for a terminal. Control characters of recorded text are made visible."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal

from rich.text import Text

from rolltap.cli.screen import visible
from rolltap.reading.types import CallLine, CallTokens, CallTurn, MessageView, PartView, SessionSummary, TokenView
from rolltap.types import TEXT_FLAWS

Colouring = Literal["mask", "log-prob", "version"]
COLOURINGS: tuple[Colouring, ...] = ("mask", "log-prob", "version")
UNLIKELY = ((-0.1, "green"), (-1.0, "yellow"), (-3.0, "dark_orange"))
"""Log-probs above the bound have the colour; those below all of them are red."""
VERSION_COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red")
SESSION_COLUMNS = ("session", "harness", "policy", "calls", "tokens", "breaks", "reward", "last")
NAME_TOKENIZER = "`rolltap view --tui STORE --tokenizer FOLDER`, or `tokenizer` in a server's settings of the policy"
TOKEN_COLUMNS = ("#", "id", "text", "", "log-prob", "version")
UNITS = ("", "k", "M", "G", "T")
ID_CHARS = 6
HARNESS_CHARS = 14
LEAST_POLICY_CHARS = 8
"""So wide is a policy's column in 80 columns beside long names of harnesses; else it gets what is left."""
NEEDED, MOST_POLICY_CHARS = 82, 22
"""Columns of all but the policy and the first message; what a wide screen gives a policy before it shows messages."""
LEAST_OPENING_CHARS = 18
"""A narrower screen has no column for the first user messages."""
FOLDED_CHARS, FOLDED_LINES = 1000, 20
"""A part of a message that is longer is folded."""
BEGINNING_CHARS, BEGINNING_LINES = 400, 5
"""What a folded part shows."""
OPENED_CHARS = 100_000
"""Of an opened part of a message; the whole is in the viewer and in `rolltap export`."""


def plain(text: str) -> Text:
    """Recorded text as text: nothing in it is markup or a control character."""
    return Text(visible(text))


def session_cells(sessions: Sequence[SessionSummary], width: int) -> tuple[Sequence[str], list[list[Text]]]:
    """The columns and rows of a list of sessions in `width` columns of text. A policy that all share has none."""
    harness_chars = max((len(session.harness) for session in sessions), default=0)
    shared = len({session.policy for session in sessions}) < 2
    about = width - (NEEDED if shared else NEEDED + MOST_POLICY_CHARS)
    about = about if about >= LEAST_OPENING_CHARS else 0
    spare = HARNESS_CHARS - min(HARNESS_CHARS, max(harness_chars, len("harness")))
    spare += min(max(0, width - 80), MOST_POLICY_CHARS if about else width)
    rows = [_session_row(session, LEAST_POLICY_CHARS + spare) for session in sessions]
    columns: Sequence[str] = SESSION_COLUMNS
    if shared:
        at = SESSION_COLUMNS.index("policy")
        columns, rows = [*columns[:at], *columns[at + 1 :]], [[*row[:at], *row[at + 1 :]] for row in rows]
    if not about:
        return columns, rows
    openings = [_cut(session.opening, about) for session in sessions]
    return [*columns, "about"], [[*row, opening] for row, opening in zip(rows, openings, strict=True)]


def _session_row(session: SessionSummary, policy_chars: int) -> list[Text]:
    return [
        plain("…" + session.id[-ID_CHARS:]),
        _cut(session.harness, HARNESS_CHARS),
        _cut(session.policy, policy_chars),
        plain(str(session.calls)),
        plain(f"{short(session.prompt_tokens)} + {short(session.output_tokens)}"),
        plain(str(session.breaks)),
        plain("" if session.reward is None else f"{session.reward:.3g}"),
        plain("" if session.last_call_at is None else _moment(session.last_call_at)),
    ]


def _cut(text: str, width: int) -> Text:
    cut = plain(text)
    cut.truncate(width, overflow="ellipsis")
    return cut


def _moment(at: float) -> str:
    """The time of today, the day of others."""
    day, today = (time.strftime("%m-%d", time.localtime(when)) for when in (at, time.time()))
    return time.strftime("%H:%M", time.localtime(at)) if day == today else day


def short(count: int) -> str:
    """A count in at most four characters: 999, 1.2k, 45k, 6.7M."""
    value, power = float(count), 0
    while round(value) >= 1000:
        value, power = value / 1000, power + 1
    return f"{value:.1f}{UNITS[power]}" if power and value < 9.95 else f"{value:.0f}{UNITS[power]}"


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


def turn_text(call: CallLine, turn: CallTurn | None, *, opened: bool = False) -> Text:
    """What a call added to the conversation; long parts are folded unless `opened`."""
    text = call_text(call)
    for message in messages_of(turn):
        _append_message(text, message, opened)
    return text


def messages_of(turn: CallTurn | None) -> list[MessageView]:
    """What a turn shows: its new messages and its reply."""
    if turn is None:
        return []
    return [*turn.new, *([turn.reply] if turn.reply is not None else [])]


def is_long(text: str) -> bool:
    return len(text) > FOLDED_CHARS or text.count("\n") >= FOLDED_LINES


def _append_message(text: Text, message: MessageView, opened: bool) -> None:
    text.append(f"\n\n{visible(message.role)}", "bold cyan" if message.role == "assistant" else "bold")
    if message.is_error:
        text.append(" (error)", "red")
    for part in message.parts:
        _append_part(text, part, opened)


def _shown(text: str, opened: bool) -> str:
    """A part's text as far as it is shown, and how much more there is."""
    shown = text[:OPENED_CHARS]
    if is_long(text) and not opened:
        shown = "\n".join(text[:BEGINNING_CHARS].split("\n")[:BEGINNING_LINES])
    more = len(text) - len(shown)
    how = "`rolltap view` shows them" if opened else "f opens them"
    return visible(shown) + (f"\n[{more:,} more characters: {how}]" if more else "")


def _append_part(text: Text, part: PartView, opened: bool) -> None:
    content = _shown(part.text, opened)
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
    if not tokens.total:
        missing = call.flaw in TEXT_FLAWS
        why = "the upstream returned no token ids, so there are none to show" if missing else "no tokens are on record"
        return text.append(f"\n{why}", "grey62")
    last = tokens.start + len(tokens.tokens)
    text.append(f"\ntokens {tokens.start:,} to {last:,} of {tokens.total:,}, coloured by {colouring}", "grey62")
    if not tokens.vocabulary:
        text.append(f"\nno tokenizer is known, so they have no text: {NAME_TOKENIZER}", "grey62")
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
