"""`rolltap view --tui`, driven by keys: sessions, a transcript, tokens; of a store and of a server."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import pytest_asyncio
from textual.pilot import Pilot
from textual.widgets import DataTable, Input, Static
from typer.testing import CliRunner

from rolltap.cli.main import app
from rolltap.extras import install_line
from rolltap.http_client import AsyncHttpClient
from rolltap.records.source import RecordSource, ServerSource
from rolltap.tui.app import RecordApp, SessionScreen, SessionsScreen, TokensScreen

from .conftest import ReadHouse

HOSTILE = "Look [red]here[/red] \x1b]0;owned\x07 \u202ehsilgne"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def broken(read_by_all: ReadHouse) -> str:
    """A session of two calls with hostile text, and one whose second call breaks; the latter's id."""
    await (await read_by_all.talk(harness="codex")).ask({"role": "user", "content": HOSTILE}, tools=False)
    broken = await read_by_all.talk(harness="claude")
    await broken.two_turns()
    await broken.ask({"role": "user", "content": "Another zebra?"}, tools=False)
    return broken.session_id


async def until(pilot: Pilot[None], screen: type) -> None:
    while not isinstance(pilot.app.screen, screen):
        await pilot.pause()
    await pilot.app.workers.wait_for_complete()
    await pilot.pause()


def text_of(pilot: Pilot[None]) -> str:
    """What the screen shows as text: heads, turns and the rows of its table."""
    parts = [str(static.render()) for static in pilot.app.screen.query(Static)]
    for table in pilot.app.screen.query(DataTable):
        parts += [" ".join(str(cell) for cell in table.get_row_at(row)) for row in range(table.row_count)]
    return "\n".join(parts)


async def read_with_keys(source: RecordSource, broken: str) -> None:
    tui = RecordApp(source)
    async with tui.run_test(size=(120, 40)) as pilot:
        await until(pilot, SessionsScreen)
        listed = pilot.app.screen.query_one(DataTable)
        while listed.row_count < 2:
            await pilot.pause(0.1)
        assert "2 sessions" in text_of(pilot)
        assert "claude" in text_of(pilot)
        await pilot.press("enter")
        await until(pilot, SessionScreen)
        while not pilot.app.screen.query(".turn"):
            await pilot.pause(0.1)
        transcript = text_of(pilot)
        assert broken in transcript
        assert "Which files hold a zebra?" in transcript
        assert "→ bash" in transcript
        assert "stripes.txt" in transcript
        assert "break: new_conversation at token 0" in transcript
        await pilot.press("t")
        await until(pilot, TokensScreen)
        tokens = pilot.app.screen.query_one(DataTable)
        while not tokens.row_count:
            await pilot.pause(0.1)
        shown = text_of(pilot)
        assert "coloured by mask" in shown
        assert "trained" in shown
        first_sampled = tokens.get_row_at(tokens.cursor_row)
        assert str(first_sampled[3]) == "trained"
        assert float(str(first_sampled[4])) <= 0
        assert str(first_sampled[5]) == "0"
        await pilot.press("m", "m")
        await pilot.pause()
        assert "coloured by version" in text_of(pilot)
        await pilot.press("escape", "escape")
        await until(pilot, SessionsScreen)


async def test_a_store_is_read_with_keys(read_by_all: ReadHouse, broken: str) -> None:
    await read_with_keys(read_by_all.reader, broken)


async def test_a_server_is_read_with_keys(read_by_all: ReadHouse, broken: str) -> None:
    home = read_by_all.home
    async with AsyncHttpClient(home.urls["admin"], home.app.settings.keys.viewer) as client:
        await read_with_keys(ServerSource(client), broken)


@pytest.mark.usefixtures("broken")
async def test_hostile_text_is_text(read_by_all: ReadHouse) -> None:
    async with RecordApp(read_by_all.reader).run_test(size=(120, 40)) as pilot:
        await until(pilot, SessionsScreen)
        await pilot.press("slash", *"here", "enter")
        table = pilot.app.screen.query_one(DataTable)
        while table.row_count != 1:
            await pilot.pause(0.1)
        assert pilot.app.screen.query_one(Input).value == "here"
        await pilot.press("enter")
        await until(pilot, SessionScreen)
        while not pilot.app.screen.query(".turn"):
            await pilot.pause(0.1)
        shown = text_of(pilot)
        assert "Look [red]here[/red] \u241b]0;owned\u2407 \ufffdhsilgne" in shown
        assert "\x1b" not in shown


async def test_a_break_is_found_by_its_key(read_by_all: ReadHouse, broken: str) -> None:
    async with RecordApp(read_by_all.reader).run_test(size=(120, 40)) as pilot:
        screen = SessionScreen(read_by_all.reader, broken)
        await pilot.app.push_screen(screen)
        while not screen.query(".turn"):
            await pilot.pause(0.1)
        await pilot.press("b")
        call = screen.calls[screen.current]
        assert call.break_ is not None
        await pilot.press("t")
        await until(pilot, TokensScreen)
        await pilot.press("b")
        await pilot.pause()
        table = pilot.app.screen.query_one(DataTable)
        assert str(table.get_row_at(table.cursor_row)[3]).endswith("◀ break")


def test_without_a_terminal_it_says_so_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "rolltap.db").touch()
    command = [sys.executable, "-m", "rolltap", "view", "--tui", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=120, check=False)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith("rolltap: --tui needs a terminal")
    assert ended.stderr.count("\n") == 1


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "textual" else find(name, *a))
    result = CliRunner().invoke(app, ["view", "--tui", str(tmp_path)])
    assert result.exit_code == 1
    assert install_line("tui") in result.output
