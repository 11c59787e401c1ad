"""Recorded text is rendered in time, whatever it is: as plain text, if it must be."""

from __future__ import annotations

import time
from html import escape

import pytest

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


def test_arguments_that_are_nested_deeply_are_shown_as_they_are() -> None:
    deep = '{"a":' * 100_000
    assert arguments_of(deep) == [("", deep, "")]


async def test_no_recorded_text_stands_for_a_piece_of_a_page() -> None:
    page = await render_page("message.html", heading="\0000\0", text=HOSTILE, command="\0001\0", store="", section="")
    assert "␀0␀" in page
    assert "\0" not in page
