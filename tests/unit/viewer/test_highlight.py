"""Recorded text is rendered in time, whatever it is: as plain text, if it must be."""

from __future__ import annotations

import re
import time
from html import escape, unescape

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltap.proxy.viewer import highlight
from rolltap.proxy.viewer.highlight import LONGEST, CodePiece, arguments_of, highlight_text, highlighted
from rolltap.proxy.viewer.templating import render_page
from rolltap.untrusted import ReadLimits

from .conftest import HOSTILE

SLOW = "\t" * (LONGEST - 1)
"""Takes the lexer of `make` a second."""


async def test_code_that_takes_long_is_shown_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (await highlighted([CodePiece("ls", "bash")]))[0].startswith('<span class="hl">')
    monkeypatch.setattr(highlight, "WITHIN", ReadLimits(seconds=0.2))
    assert await highlighted([CodePiece(SLOW, "make"), CodePiece("ls <x>", "bash")]) == [SLOW, escape("ls <x>")]


async def test_after_a_pages_budget_the_rest_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(highlight, "BUDGET_S", 0.0)
    assert highlight.highlight_pieces([("a < b", "python", False)]) == ["a &lt; b"]


@pytest.mark.parametrize("line", ["```\n", "```x\n", "```\n```x\n", "``` \n", "a ```\n"])
def test_fences_take_time_in_proportion(line: str) -> None:
    began = time.process_time()
    highlight_text(line * (LONGEST // len(line)))
    assert time.process_time() - began < 1


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("a\n```\n<x>\n```\nb", "a\n<code>&lt;x&gt;</code>\nb"),
        ("```\n<open>\n", "```\n&lt;open&gt;\n"),
        ("```\na\n``` b\n```", "<code>a\n``` b</code>"),
        ("no ``` fence", "no ``` fence"),
    ],
)
def test_a_fenced_block_is_code(text: str, html: str) -> None:
    assert highlight_text(text) == html


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("# A <b>heading</b>\n", '<b class="h"># A &lt;b&gt;heading&lt;/b&gt;</b>\n'),
        ("so **very <i>bold** it is", "so <b>**very &lt;i&gt;bold**</b> it is"),
        ("run `rm <x>` now", "run <code>`rm &lt;x&gt;`</code> now"),
        ("- one\n  2. two", '<span class="md">- </span>one\n<span class="md">  2. </span>two'),
        ("> said", '<span class="md">&gt; said</span>'),
        ("[here](javascript:alert(1)) ![x](http://evil/x.png) <http://evil>", None),
        ("a * b ** c, snake_case_name, #no heading, 3.5 and **  **", None),
    ],
)
def test_markdown_keeps_its_marks_and_makes_no_link(text: str, html: str | None) -> None:
    assert highlight_text(text) == (escape(text) if html is None else html)


MARKS = st.sampled_from(["**", "`", "```", "\n", "# ", "- ", "1. ", "> ", "<b>", "a", " ", "[x](y)", "&", "<script>"])


@given(st.lists(MARKS, max_size=40).map("".join))
def test_whatever_is_marked_up_its_text_is_what_was_recorded(text: str) -> None:
    """No tag is made but our own, and without the tags the text is all there."""
    html = highlight_text(text)
    tags = set(re.findall(r"<[^>]*>", html))
    assert tags <= {
        "<b>",
        "</b>",
        '<b class="h">',
        "<code>",
        "</code>",
        '<span class="md">',
        '<span class="hl">',
        "</span>",
    }
    shown = unescape(re.sub(r"<[^>]*>", "", html))
    assert shown == text or "```" in text  # a block's fences are not shown
    if not CodePiece(text, is_prose=True).is_plain:
        return
    assert html == escape(text), "what needs no reader process is shown as it is"


@pytest.mark.parametrize("part", ["**", "`", "**a", "`a", "# ", "- ", "1.", "> ", "**a*", "``"])
def test_markdown_takes_time_in_proportion(part: str) -> None:
    began = time.process_time()
    for text in (part * (LONGEST // len(part)), f"{part}\n" * (LONGEST // (len(part) + 1))):
        highlight_text(text)
        assert isinstance(CodePiece(text, is_prose=True).is_plain, bool)
    assert time.process_time() - began < 1


def test_arguments_that_are_nested_deeply_are_shown_as_they_are() -> None:
    deep = '{"a":' * 100_000
    assert arguments_of(deep) == [("", deep, "")]


async def test_no_recorded_text_stands_for_a_piece_of_a_page() -> None:
    page = await render_page("message.html", heading="\0000\0", text=HOSTILE, command="\0001\0", store="", section="")
    assert "␀0␀" in page
    assert "\0" not in page
