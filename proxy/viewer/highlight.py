"""Renders code and diffs as HTML with class names. The text is escaped, by pygments or here.

Lexers of pygments take long for some texts. So the pieces of a page are highlighted together in a reader process
(`rolltap.untrusted`) with the time limit `WITHIN`; if they take longer, they are shown plain. The code that runs in the
server itself takes time linear in the text.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from html import escape

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexer import Lexer
from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound

from rolltap.errors import Unreadable
from rolltap.untrusted import ReaderServer, ReadLimits

LONGEST = 40_000
"""Texts with more characters are shown plain: highlighting costs a millisecond for some 2,000 characters."""
PAGE_CHARS = 2_000_000
"""Characters of a page that are highlighted; the rest is shown plain."""
BUDGET_S = 1.0
"""Seconds after which the rest of a page's pieces stays plain."""
WITHIN = ReadLimits(memory_mb=256, file_mb=1, cpu_s=3, seconds=10.0)
READERS = ReaderServer((__name__,))

_FENCE = re.compile(r"```([\w+-]*+)[^\n]*+\n?")
_DIFF = re.compile(r"^(diff --git |\*\*\* Begin Patch|--- [^\s][^\n]*\n\+\+\+ |@@ -\d)", re.MULTILINE)
_MARKDOWN = re.compile(
    r"(?P<heading>^#{1,6} [^\n]{1,400})|(?P<strong>\*\*[^\s*][^*\n]{0,200}\*\*)|(?P<code>`[^`\n]{1,200}`)"
    r"|(?P<mark>^ {0,8}(?:[-*+]|\d{1,3}[.)]) )|(?P<quote>^> [^\n]{0,400})",
    re.MULTILINE,
)
_HAS_MARKDOWN = re.compile(r"^#{1,6} |\*\*[^\s*]|`[^`\n]{1,200}`|^ {0,8}(?:[-*+]|\d{1,3}[.)]) |^> ", re.MULTILINE)
_FORMATTER = HtmlFormatter(nowrap=True)


@dataclass(frozen=True, slots=True)
class CodePiece:
    """A text to highlight: prose, with fenced blocks of code, or code in a language ("": unknown)."""

    text: str
    language: str = ""
    is_prose: bool = False

    @property
    def is_plain(self) -> bool:
        """True if highlighting would only escape it."""
        if len(self.text) > LONGEST:
            return True
        if self.is_prose:
            return _HAS_MARKDOWN.search(self.text) is None and not _is_diff(self.text)
        return _lexer(self.language) is None and not _is_diff(self.text)

    def render(self) -> str:
        return highlight_text(self.text) if self.is_prose else highlight_code(self.text, self.language)


async def highlighted(pieces: Sequence[CodePiece]) -> list[str]:
    """Renders the pieces as HTML; as plain text if they can't be highlighted in time."""
    if not pieces:
        return []
    try:
        rows = [(piece.text, piece.language, piece.is_prose) for piece in pieces]
        return await READERS.ask_within(WITHIN, highlight_pieces, rows)
    except Unreadable:
        return [escape(piece.text) for piece in pieces]


def highlight_pieces(rows: list[tuple[str, str, bool]]) -> list[str]:
    """Renders pieces in their order, until the budget is used up."""
    until, left = time.monotonic() + BUDGET_S, PAGE_CHARS
    rendered = []
    for row in rows:
        left -= len(row[0])
        in_budget = time.monotonic() < until and left >= 0
        rendered.append(CodePiece(*row).render() if in_budget else escape(row[0]))
    return rendered


@lru_cache(64)
def _lexer(language: str) -> Lexer | None:
    try:
        return get_lexer_by_name(language, stripnl=False, ensurenl=False)
    except ClassNotFound:
        return None


def _is_diff(text: str) -> bool:
    return _DIFF.search(text[:4000]) is not None


def highlight_code(text: str, language: str = "") -> str:
    """Renders `text` as HTML. Without a language, a diff is recognised by its content."""
    if not language and _is_diff(text):
        language = "diff"
    lexer = _lexer(language) if language and len(text) <= LONGEST else None
    if lexer is None:
        return escape(text)
    return f'<span class="hl">{highlight(text, lexer, _FORMATTER)}</span>'


def highlight_text(text: str) -> str:
    """Renders prose as HTML: its fenced blocks as code, and its Markdown with its marks, so that every character of the
    text stays in view. Links are not made: whatever an agent writes leads nowhere."""
    if _is_diff(text) and "```" not in text:
        return highlight_code(text, "diff")
    return "".join(_blocks(text.splitlines(keepends=True))) if len(text) <= LONGEST else escape(text)


def _blocks(lines: Iterable[str]) -> Iterator[str]:
    """The text's parts as HTML: a block ends with the next line of nothing but a fence, and is code only if it ends."""
    fence, language, inner = "", "", list[str]()
    for line in lines:
        if not fence:
            opening = _FENCE.fullmatch(line)
            if opening is None or not line.endswith("\n"):
                yield from _marked_up(line)
            else:
                fence, language, inner = line, opening[1], []
        elif line.rstrip() == "```":
            end = line[line.rindex("```") + 3 :].lstrip(" \t")
            yield f"<code>{highlight_code(''.join(inner).rstrip(), language)}</code>{escape(end)}"
            fence = ""
        else:
            inner.append(line)
    if fence:
        yield escape(fence + "".join(inner))


def _marked_up(line: str) -> Iterator[str]:
    """A line with its heading, strong words, code, list mark or quotation set off. Takes time linear in its length."""
    at = 0
    for match in _MARKDOWN.finditer(line):
        yield escape(line[at : match.start()])
        at = match.end()
        text = escape(match[0])
        match match.lastgroup:
            case "heading":
                yield f'<b class="h">{text}</b>'
            case "strong":
                yield f"<b>{text}</b>"
            case "code":
                yield f"<code>{text}</code>"
            case _:
                yield f'<span class="md">{text}</span>'
    yield escape(line[at:])


def arguments_of(text: str) -> list[tuple[str, str, str]]:
    """Returns a tool call's arguments as (name, value, language); one nameless row if they are no JSON object."""
    try:
        value = json.loads(text)
        if not isinstance(value, dict) or not value:
            return [("", text, "json")]
        return [_argument(str(name), inner) for name, inner in value.items()]
    except (ValueError, RecursionError):
        return [("", text, "")]


def _argument(name: str, value: object) -> tuple[str, str, str]:
    if isinstance(value, str):
        return name, value, "bash" if name in ("command", "cmd", "script") else ""
    if name in ("command", "cmd") and isinstance(value, list) and all(isinstance(part, str) for part in value):
        return name, " ".join(value), "bash"
    return name, json.dumps(value, ensure_ascii=False, indent=1), "json"
