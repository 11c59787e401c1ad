"""Sessions and tables as HTML for a notebook. All that was recorded is escaped: it may hold anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from html import escape
from typing import Any

from rolltap.reading.types import CallTurn, MessageView, SessionDetail
from rolltap.wording import utc_text

LONGEST_PART = 2000
COLUMNS = ("id", "policy", "harness", "calls", "output_tokens", "breaks", "reward", "status", "tags")
_CELL = 'style="text-align:left;vertical-align:top;padding:2px 8px"'
_PRE = 'style="white-space:pre-wrap;margin:2px 0 8px 0;font-family:monospace"'


def session_html(session: SessionDetail, turns: Sequence[CallTurn], *, at_most: int = 40) -> str:
    """A session's line and its transcript, the first `at_most` calls."""
    summary = session.summary
    opened = utc_text(summary.created_at, "%Y-%m-%d %H:%M UTC")
    facts = {
        "policy": summary.policy,
        "harness": summary.harness,
        "opened": opened,
        "calls": summary.calls,
        "sampled tokens": f"{summary.output_tokens:,}",
        "breaks": summary.breaks,
        "reward": summary.reward,
    }
    head = " · ".join(
        f"{escape(name)} {escape(str(value))}" for name, value in facts.items() if value not in (None, "")
    )
    lines = {line.id: line for line in session.calls}
    blocks = []
    for turn in turns[:at_most]:
        line = lines[turn.call_id]
        note = f"{line.kind} call, {line.prompt_tokens:,} + {line.output_tokens:,} tokens, {line.outcome}"
        messages = [*turn.new, *([turn.reply] if turn.reply is not None else [])]
        blocks.append(f"<details open><summary>{escape(note)}</summary>{''.join(map(_message, messages))}</details>")
    rest = len(turns) - len(blocks)
    more = f"<p>… and {rest:,} more calls</p>" if rest > 0 else ""
    return f"<div><b>session {escape(summary.id)}</b><br>{head}{''.join(blocks)}{more}</div>"


def table_html(kind: type, rows: Sequence[Any], *, more: bool) -> str:
    """The first rows of a table."""
    known = [field.name for field in fields(kind)]
    names = [name for name in COLUMNS if name in known] or known[:8]
    head = "".join(f"<th {_CELL}>{escape(name)}</th>" for name in names)
    body = "".join(
        "<tr>" + "".join(f"<td {_CELL}>{escape(_short(getattr(row, name)))}</td>" for name in names) + "</tr>"
        for row in rows
    )
    end = "<p>… and more</p>" if more else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{end}"


def _message(message: MessageView) -> str:
    parts = []
    for part in message.parts:
        text = f"{part.name}({part.text})" if part.kind == "tool_call" else part.text
        text = "(an image)" if part.kind == "image" else text
        cut = (
            text
            if len(text) <= LONGEST_PART
            else f"{text[:LONGEST_PART]} … {len(text) - LONGEST_PART:,} more characters"
        )
        role = message.role if part.kind == "text" else f"{message.role}, {part.kind.replace('_', ' ')}"
        parts.append(f"<i>{escape(role)}</i><div {_PRE}>{escape(cut)}</div>")
    return "".join(parts)


def _short(value: Any) -> str:
    text = "" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:59]}…"
