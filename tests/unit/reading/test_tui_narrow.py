"""`rolltap view --tui` in 80 columns, of a record that is made here: what fits, what is folded, what a key says."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
from textual.containers import VerticalScroll
from textual.pilot import Pilot
from textual.screen import Screen
from textual.widgets import DataTable, Footer, Static

from rolltap.reading.types import (
    CallLine,
    CallTokens,
    CallTurn,
    MessageView,
    PartView,
    SessionDetail,
    SessionPage,
    SessionQuery,
    SessionSummary,
    TokenView,
)
from rolltap.records.source import RecordSource
from rolltap.tui.app import RecordApp, SessionScreen, SessionsScreen, TokensScreen
from rolltap.tui.lines import short

INSTRUCTIONS = "You are a coding agent. " * 700 + "The end."
YESTERDAY = time.time() - 86400
SESSION = SessionSummary(
    "01kc3w6x9fq2v7h8m4nd",
    "solver-of-hard-tasks",
    0.0,
    1.0,
    harness="claude-code",
    calls=12345,
    prompt_tokens=123_456_789,
    output_tokens=456_789,
    breaks=123,
    reward=-1 / 3,
    opening="Fix the failing parser test and say what was wrong with it",
    last_call_at=YESTERDAY,
)
CALL = CallLine(
    id="01kc3w6x9fq2v7h8m4ne",
    session_id=SESSION.id,
    parent_id=None,
    policy=SESSION.policy,
    agent="",
    kind="main",
    rule="",
    mask="",
    created_at=0.0,
    finished_at=1.0,
    dialect="openai_responses",
    model="m",
    engine="main",
    outcome="completed",
    finish="stop",
    flaw=None,
    error="",
    prompt_tokens=1,
    output_tokens=1,
    shared=0,
    break_=None,
    versions=(),
    delivered=True,
    retry_of=None,
    preview="",
    tool_calls=(),
)
TEXT_CALL = replace(CALL, prompt_tokens=18, output_tokens=5, flaw="tokens_missing", token_ids=False)
TOKENS = (TokenView(0, 5, "", False, False, False), TokenView(1, 6, "", True, False, True, logprob=-0.5))


@dataclass
class MadeSource:
    """A record of `sessions`; each has the one `call`."""

    sessions_: tuple[SessionSummary, ...] = (SESSION,)
    call: CallLine = CALL

    async def sessions(self, query: SessionQuery) -> SessionPage:
        return SessionPage(self.sessions_, len(self.sessions_), 1.0)

    async def session(self, session_id: str) -> SessionDetail:
        return SessionDetail(SESSION, (self.call,), {}, ())

    async def transcript(self, session_id: str) -> tuple[CallTurn, ...]:
        system = MessageView("system", (PartView("text", INSTRUCTIONS),))
        question = MessageView("user", (PartView("text", "Which files hold a zebra?"),))
        return (CallTurn(self.call.id, "main", "", (system, question), None),)

    async def tokens(self, call_id: str, start: int = 0, end: int | None = None) -> CallTokens:
        tokens = TOKENS[start:end] if self.call.token_ids else ()
        return CallTokens(call_id, "p", self.call.prompt_tokens, self.call.length, start, tokens, vocabulary=False)


@asynccontextmanager
async def narrow(source: MadeSource, *screens: Screen[Any]) -> AsyncIterator[Pilot[None]]:
    async with RecordApp(cast("RecordSource", source)).run_test(size=(80, 24)) as pilot:
        while not isinstance(pilot.app.screen, SessionsScreen):
            await pilot.pause()
        for screen in screens:
            await pilot.app.push_screen(screen)
        await pilot.app.workers.wait_for_complete()
        await pilot.pause()
        yield pilot


def session_screen(source: MadeSource) -> SessionScreen:
    return SessionScreen(cast("RecordSource", source), SESSION.id)


def tokens_screen(source: MadeSource) -> TokensScreen:
    return TokensScreen(cast("RecordSource", source), source.call)


def said(pilot: Pilot[None]) -> list[str]:
    return [notification.message for notification in pilot.app._notifications]


def shown(pilot: Pilot[None]) -> str:
    return " ".join("\n".join(str(static.render()) for static in pilot.app.screen.query(Static)).split())


@pytest.mark.parametrize("other_policy", [None, "another-policy-of-many"])
async def test_every_column_of_the_list_fits(other_policy: str | None) -> None:
    sessions = [replace(SESSION, id=f"{number:020d}", harness="mini-swe-agent") for number in range(60)]
    sessions[1] = replace(sessions[1], policy=other_policy or SESSION.policy)
    async with narrow(MadeSource(tuple(sessions))) as pilot:
        table = pilot.app.screen.query_one(DataTable)
        assert (table.row_count, table.show_vertical_scrollbar) == (60, True)
        assert table.max_scroll_x == 0, table.virtual_size
        named = [str(column.label) for column in table.columns.values()]
        assert ("policy" in named) is (other_policy is not None)
        assert ("policy solver-of-hard-tasks" in shown(pilot)) is (other_policy is None)
        row = [str(cell) for cell in table.get_row_at(0)]
        assert row[:2] == ["…000000", "mini-swe-agent"]
        day = time.strftime("%m-%d", time.localtime(YESTERDAY))
        assert row[-5:] == ["12345", "123M + 457k", "123", "-0.333", day]
        await pilot.resize_terminal(110, 24)
        await pilot.pause()
        if other_policy:
            assert other_policy in str(table.get_row_at(1)[2]), "a wider terminal shows more of a policy"
        await pilot.resize_terminal(150, 24)
        await pilot.pause()
        assert str(table.get_row_at(0)[-1]).startswith("Fix the failing parser"), "and what a session is about"
        assert table.max_scroll_x == 0, table.virtual_size


async def test_a_list_that_is_drawn_anew_keeps_its_cursor() -> None:
    source = MadeSource(tuple(replace(SESSION, id=f"{number:020d}") for number in range(9)))
    async with narrow(source) as pilot:
        await pilot.press("j", "j", "j")
        source.sessions_ = (SESSION, *source.sessions_)
        await cast("SessionsScreen", pilot.app.screen).refresh_sessions()
        assert pilot.app.screen.query_one(DataTable).cursor_row == 4


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0"), (999, "999"), (1000, "1.0k"), (9960, "10k"), (999_600, "1.0M"), (45_678_901, "46M")]
)
def test_counts_have_four_characters(count: int, text: str) -> None:
    assert short(count) == text


@pytest.mark.parametrize("of", [session_screen, tokens_screen])
async def test_every_key_of_the_footer_fits(of: Any) -> None:
    source = MadeSource()
    async with narrow(source, of(source)) as pilot:
        footer = pilot.app.screen.query_one(Footer)
        keys = [child for child in footer.query("FooterKey") if child.display]
        assert len(keys) >= 7
        assert max(child.virtual_region.right for child in keys) <= 80


async def test_a_key_that_finds_nothing_says_so() -> None:
    source = MadeSource()
    async with narrow(source, session_screen(source)) as pilot:
        await pilot.press("b")
        assert said(pilot) == ["no later call has a break"]
        await pilot.app.push_screen(tokens_screen(source))
        await pilot.pause()
        await pilot.press("b", "n", "p")
        assert said(pilot)[1:] == ["this call has no break", "these are the last tokens", "these are the first tokens"]


async def test_a_long_text_is_folded_until_its_key() -> None:
    source = MadeSource()
    async with narrow(source, session_screen(source)) as pilot:
        folded = shown(pilot)
        assert re.search(r"You are a coding agent\..* \[16,\d{3} more characters: f opens them\]", folded)
        assert "Which files hold a zebra?" in folded
        assert pilot.app.screen.query_one(VerticalScroll).max_scroll_y == 0, "all of it is on the screen"
        await pilot.press("f")
        await pilot.pause()
        assert "The end." in shown(pilot)
        assert "more characters" not in shown(pilot)
        await pilot.press("pagedown")
        await pilot.wait_for_scheduled_animations()
        assert pilot.app.screen.query_one(VerticalScroll).scroll_y > 0
        await pilot.press("f")
        await pilot.pause()
        assert shown(pilot) == folded


async def test_tokens_without_a_tokenizer_name_the_option() -> None:
    source = MadeSource()
    async with narrow(source, tokens_screen(source)) as pilot:
        assert "no tokenizer is known" in shown(pilot)
        assert "--tokenizer FOLDER" in shown(pilot)


async def test_a_call_of_text_alone_blames_the_upstream() -> None:
    source = MadeSource(call=TEXT_CALL)
    async with narrow(source, tokens_screen(source)) as pilot:
        text = shown(pilot)
        assert "18 + 5 tokens" in text
        assert "the upstream returned no token ids, so there are none to show" in text
        assert "tokenizer" not in text
        await pilot.press("o", "n", "l")
        assert said(pilot) == ["these are the last tokens", "none of these tokens was sampled"]
