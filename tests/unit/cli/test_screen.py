"""A terminal obeys what is printed to it; recorded text is printed so that it has nothing to say to one."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from rolltap.cli.screen import Screen, say, visible
from rolltap.cli.tasks import describe
from rolltap.reading.types import RolloutDetail
from rolltap.tampering import TamperingAct, TamperingKind
from rolltap.types import Reward, Rollout

HOSTILE = "\x1b]0;title\x07\x1b[2J\x1b[31mred\x9b1m \u202ereversed\u2066 \r\b\x7f [/nope] [red]x[/red] [link=file:///x]y[/link]"
OBEYED = set("\x1b\x07\x9b\u202e\u2066\r\b\x7f")


LONG = "one line of many words " * 20


def written(thing: Any, **options: Any) -> str:
    """What a screen of 80 columns makes of `thing`."""
    file = io.StringIO()
    Screen(file=file, width=80, **options).print(thing)
    return file.getvalue()


def test_lines_are_whole_where_no_terminal_shows_them() -> None:
    assert written(LONG) == written(Text(LONG, "red")) == LONG + "\n"
    assert all(len(line) <= 80 for line in written(LONG, force_terminal=True).splitlines())


def test_a_table_keeps_its_width() -> None:
    wide = Table("text")
    wide.add_row(LONG)
    assert all(len(line) <= 80 for line in written(wide).splitlines())


def printed(thing: Any, **options: Any) -> str:
    file = io.StringIO()
    Screen(file=file, width=200, **options).print(thing)
    return file.getvalue()


def table() -> Table:
    table = Table(HOSTILE, title=HOSTILE)
    table.add_row(HOSTILE)
    return table


def tree() -> Tree:
    tree = Tree(HOSTILE)
    tree.add(Text(HOSTILE, "red"))
    return tree


@pytest.mark.parametrize("thing", [HOSTILE, table(), tree(), Text(HOSTILE)], ids=["text", "table", "tree", "styled"])
def test_a_screen_prints_text_as_text(thing: Any) -> None:
    shown = printed(thing)
    assert not OBEYED & set(shown)
    assert "[/nope] [red]x[/red]" in shown
    assert "␛[2J" in shown


def test_our_own_colours_remain() -> None:
    shown = printed(Text("a\x1b[0mb", "red"), force_terminal=True, color_system="standard")
    assert shown.startswith("\x1b[31ma␛[0mb")


def test_what_is_said_is_text(capsys: pytest.CaptureFixture[str]) -> None:
    say(HOSTILE, style="red", err=True)
    say(HOSTILE)
    told = capsys.readouterr()
    assert not OBEYED & set(told.out + told.err)
    assert told.out.rstrip("\n") == visible(HOSTILE)


def test_lines_and_tabs_stay() -> None:
    assert visible("a\n\tb ä 漢 🙂") == "a\n\tb ä 漢 🙂"


def test_a_rollout_says_nothing_to_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    reward = Reward("w", "r", 1.0, f"role:{HOSTILE}", HOSTILE, {"unprotected": HOSTILE})
    rollout = Rollout(HOSTILE, "g", HOSTILE, 0, attempt=1, session_id=HOSTILE, reason=HOSTILE, rewards=(reward,))
    acts = (TamperingAct(TamperingKind.TESTS, HOSTILE),)
    say(describe(RolloutDetail(replace(rollout, tampering={HOSTILE: 1}), None, None, HOSTILE, 1, acts)))
    assert not OBEYED & set(capsys.readouterr().out)
