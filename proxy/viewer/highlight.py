"""Renders code and diffs as HTML with class names. The text is escaped, by pygments or here."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from html import escape

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexer import Lexer
from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound

LONGEST = 40_000
"""Texts with more characters are shown plain: highlighting costs a millisecond for some 2,000 characters."""

_FENCE = re.compile(r"^```([\w+-]*)[^\n]*\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)
_DIFF = re.compile(r"^(diff --git |\*\*\* Begin Patch|--- \S+.*\n\+\+\+ |@@ -\d)", re.MULTILINE)
_FORMATTER = HtmlFormatter(nowrap=True)


@lru_cache(64)
def _lexer(language: str) -> Lexer | None:
    try:
        return get_lexer_by_name(language, stripnl=False, ensurenl=False)
    except ClassNotFound:
        return None


def highlight_code(text: str, language: str = "") -> str:
    """Renders `text` as HTML. Without a language, a diff is recognised by its content."""
    if not language and _DIFF.search(text[:4000]):
        language = "diff"
    lexer = _lexer(language) if language and len(text) <= LONGEST else None
    if lexer is None:
        return escape(text)
    return f'<span class="hl">{highlight(text, lexer, _FORMATTER)}</span>'


def highlight_text(text: str) -> str:
    """Renders prose as HTML, its fenced blocks as code."""
    if _DIFF.search(text[:4000]) and "```" not in text:
        return highlight_code(text, "diff")
    pieces, position = [], 0
    for match in _FENCE.finditer(text) if len(text) <= LONGEST else ():
        pieces.append(escape(text[position : match.start()]))
        pieces.append(f"<code>{highlight_code(match[2].rstrip(), match[1])}</code>")
        position = match.end()
    pieces.append(escape(text[position:]))
    return "".join(pieces)


def arguments_of(text: str) -> list[tuple[str, str, str]]:
    """Returns a tool call's arguments as (name, value, language); one nameless row if they are no JSON object."""
    try:
        value = json.loads(text)
    except ValueError:
        return [("", text, "")]
    if not isinstance(value, dict) or not value:
        return [("", text, "json")]
    return [_argument(str(name), inner) for name, inner in value.items()]


def _argument(name: str, value: object) -> tuple[str, str, str]:
    if isinstance(value, str):
        return name, value, "bash" if name in ("command", "cmd", "script") else ""
    if name in ("command", "cmd") and isinstance(value, list) and all(isinstance(part, str) for part in value):
        return name, " ".join(value), "bash"
    return name, json.dumps(value, ensure_ascii=False, indent=1), "json"
