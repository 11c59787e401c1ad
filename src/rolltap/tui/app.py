"""The screens of `rolltap view --tui`: sessions, a session's transcript, a call's tokens. They only read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import Screen
from textual.widgets import DataTable, Footer, Input, Static

from rolltap.errors import RolltapError
from rolltap.reading.types import CallLine, CallTurn, SessionPage, SessionQuery, SessionSummary
from rolltap.records.source import RecordSource
from rolltap.tui import lines
from rolltap.tui.lines import COLOURINGS, Colouring
from rolltap.wording import counted

SESSIONS_AT_ONCE = 200
CALLS_AT_MOST = 500
TOKENS_AT_ONCE = 1000
ABOVE = 6
"""Tokens that stand above the one that is looked for."""
FOLLOW_S = 2.0
"""How often the list of sessions asks again."""
SAID_S = 3.0


class RecordApp(App[None]):
    """The record of `source` in a terminal; `search` are words of the first list."""

    TITLE = "rolltap"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #head { padding: 0 1; background: $panel; height: auto; max-height: 8; }
    #note { padding: 0 1; color: $text-muted; height: 1; }
    .turn { padding: 0 1 1 1; border-left: thick $background; height: auto; }
    .turn.current { border-left: thick $accent; background: $boost; }
    DataTable { height: 1fr; }
    """

    def __init__(self, source: RecordSource) -> None:
        super().__init__()
        self.source = source

    def on_mount(self) -> None:
        self.push_screen(SessionsScreen(self.source))

    def report(self, error: RolltapError) -> None:
        """Shows what went wrong; the screen stays as it is."""
        self.notify(lines.plain(error.message).plain, severity="error", markup=False)

    def say(self, text: str) -> None:
        """Says why a key did nothing."""
        self.notify(text, timeout=SAID_S, markup=False)


class RecordScreen(Screen[None]):
    """A screen that reads from `source`."""

    app: RecordApp  # type: ignore[assignment]  # the one app that shows it

    def __init__(self, source: RecordSource) -> None:
        super().__init__()
        self.source = source


class SessionsScreen(RecordScreen):
    """The newest sessions, or those that hold the words searched for."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "search", "search"),
        Binding("enter", "open", "open", show=True),
        Binding("j", "next", show=False),
        Binding("k", "previous", show=False),
        Binding("q", "app.quit", "quit"),
    ]

    def __init__(self, source: RecordSource) -> None:
        super().__init__(source)
        self._words = ""
        self._known: list[SessionSummary] | None = None

    def compose(self) -> ComposeResult:
        yield Input(placeholder="search: words that were said; Enter", id="search")
        yield Static("", id="note", markup=False)
        yield DataTable(cursor_type="row", zebra_stripes=True)
        yield Footer()

    async def on_mount(self) -> None:
        self.table.focus()
        await self.refresh_sessions()
        self.set_interval(FOLLOW_S, self.refresh_sessions)

    @property
    def table(self) -> DataTable[object]:
        return self.query_one(DataTable)

    async def refresh_sessions(self) -> None:
        """Asks for the sessions again; the cursor stays on its session."""
        try:
            page = await self.source.sessions(SessionQuery(self._words, limit=SESSIONS_AT_ONCE))
        except RolltapError as error:
            self.app.report(error)
            return
        self.query_one("#note", Static).update(lines.plain(_note(page)))
        if list(page.sessions) != self._known:
            self._show(list(page.sessions))

    def on_resize(self) -> None:
        if self._known is not None:
            self._show(self._known)

    def _show(self, sessions: list[SessionSummary]) -> None:
        row = self.table.cursor_row
        selected = self._known[row].id if self._known and row < len(self._known) else None
        self._known = sessions
        columns, rows = lines.session_cells(sessions, self.app.size.width)
        self.table.clear(columns=True)
        self.table.add_columns(*columns)
        for session, cells in zip(sessions, rows, strict=True):
            self.table.add_row(*cells, key=session.id)
        ids = [session.id for session in sessions]
        if selected in ids:
            self.table.move_cursor(row=ids.index(selected))

    async def on_input_submitted(self, event: Input.Submitted) -> None:
        self._words = event.value
        await self.refresh_sessions()
        self.table.focus()

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        if event.row_key.value is not None:
            self.app.push_screen(SessionScreen(self.source, event.row_key.value))

    def action_search(self) -> None:
        self.query_one(Input).focus()

    def action_open(self) -> None:
        self.table.action_select_cursor()

    def action_next(self) -> None:
        self.table.action_cursor_down()

    def action_previous(self) -> None:
        self.table.action_cursor_up()


class SessionScreen(RecordScreen):
    """A session's text, call by call; the marked call is the one whose tokens `t` shows."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j,down", "move(1)", "next"),
        Binding("k,up", "move(-1)", "previous"),
        Binding("b", "next_break", "break"),
        Binding("f", "fold", "fold"),
        Binding("t,enter", "tokens", "tokens"),
        Binding("escape,u", "app.pop_screen", "back"),
        Binding("q", "app.quit", "quit"),
    ]

    def __init__(self, source: RecordSource, session_id: str) -> None:
        super().__init__(source)
        self._id = session_id
        self.calls: tuple[CallLine, ...] = ()
        self.current = 0
        self._turns: Mapping[str, CallTurn] = {}
        self._opened: set[str] = set()

    def compose(self) -> ComposeResult:
        yield Static(lines.plain(self._id), id="head")
        yield VerticalScroll(id="transcript")
        yield Footer()

    async def on_mount(self) -> None:
        try:
            detail = await self.source.session(self._id)
            self._turns = {turn.call_id: turn for turn in await self.source.transcript(self._id)}
        except RolltapError as error:
            self.app.report(error)
            return
        self.calls = detail.calls[:CALLS_AT_MOST]
        head = f"{self._id}  {detail.summary.harness}  policy {detail.summary.policy}"
        if len(self.calls) < len(detail.calls):
            head += f"\nthe first {len(self.calls)} of {len(detail.calls):,} calls; `rolltap view` shows all of them"
        self.query_one("#head", Static).update(lines.plain(head))
        await self.query_one(VerticalScroll).mount_all(
            [Static(self._text(call), classes="turn") for call in self.calls]
        )
        self._mark()

    def _text(self, call: CallLine) -> Text:
        return lines.turn_text(call, self._turns.get(call.id), opened=call.id in self._opened)

    def action_move(self, by: int) -> None:
        self.current = max(0, min(len(self.calls) - 1, self.current + by))
        self._mark()

    def action_next_break(self) -> None:
        after = [place for place, call in enumerate(self.calls) if call.break_ is not None and place > self.current]
        if after:
            self.action_move(after[0] - self.current)
        else:
            self.app.say("no later call has a break")

    def action_fold(self) -> None:
        """Opens the long texts of the marked call, or folds them again."""
        if not self.calls:
            return
        call = self.calls[self.current]
        messages = lines.messages_of(self._turns.get(call.id))
        if not any(lines.is_long(part.text) for message in messages for part in message.parts):
            self.app.say("this call has no long text")
            return
        self._opened ^= {call.id}
        list(self.query(".turn").results(Static))[self.current].update(self._text(call))
        self.call_after_refresh(self._mark)

    def action_tokens(self) -> None:
        if self.calls:
            self.app.push_screen(TokensScreen(self.source, self.calls[self.current]))

    def _mark(self) -> None:
        for place, turn in enumerate(self.query(".turn")):
            turn.set_class(place == self.current, "current")
            if place == self.current:
                turn.scroll_visible(animate=False, top=True)


class TokensScreen(RecordScreen):
    """A call's tokens as the engine saw them, 1,000 at a time: mask, log-prob, version, break."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("m", "colouring", "colour"),
        Binding("n", "page(1)", "next"),
        Binding("p", "page(-1)", "prev"),
        Binding("o", "output", "output"),
        Binding("b", "break", "break"),
        Binding("l", "least", "least"),
        Binding("escape,u", "app.pop_screen", "back"),
        Binding("q", "app.quit", "quit"),
    ]

    def __init__(self, source: RecordSource, call: CallLine) -> None:
        super().__init__(source)
        self._call = call
        self._colouring: Colouring = COLOURINGS[0]
        self._start = 0

    def compose(self) -> ComposeResult:
        yield Static("", id="head")
        yield DataTable(cursor_type="row")
        yield Footer()

    async def on_mount(self) -> None:
        self.table.add_columns(*lines.TOKEN_COLUMNS)
        self.table.focus()
        await self.action_output()

    @property
    def table(self) -> DataTable[object]:
        return self.query_one(DataTable)

    async def _show(self, at: int | None = None) -> None:
        """Shows the thousand from `_start` on, with the cursor at position `at` of the call."""
        try:
            self._tokens = await self.source.tokens(self._call.id, self._start, self._start + TOKENS_AT_ONCE)
        except RolltapError as error:
            self.app.report(error)
            return
        self.query_one("#head", Static).update(lines.tokens_head(self._call, self._tokens, self._colouring))
        self.table.clear()
        for token in self._tokens.tokens:
            self.table.add_row(*lines.token_row(token, self._call, self._colouring))
        row = max(0, (self._start if at is None else at) - self._start)
        self.table.move_cursor(row=row, scroll=False)
        self.call_after_refresh(self.table.scroll_to, y=max(0, row - ABOVE), animate=False)

    async def _go_to(self, position: int) -> None:
        self._start = position // TOKENS_AT_ONCE * TOKENS_AT_ONCE
        await self._show(position)

    async def action_colouring(self) -> None:
        self._colouring = COLOURINGS[(COLOURINGS.index(self._colouring) + 1) % len(COLOURINGS)]
        await self._show(self._start + self.table.cursor_row)

    async def action_page(self, by: int) -> None:
        start = self._start + by * TOKENS_AT_ONCE
        if 0 <= start < self._tokens.total:
            self._start = start
            await self._show()
        else:
            self.app.say("these are the last tokens" if by > 0 else "these are the first tokens")

    async def action_output(self) -> None:
        """To the first sampled token."""
        await self._go_to(self._call.prompt_tokens if self._call.prompt_tokens < self._call.length else 0)

    async def action_break(self) -> None:
        if self._call.break_ is not None:
            await self._go_to(self._call.break_.token_index)
        else:
            self.app.say("this call has no break")

    def action_least(self) -> None:
        """To the least likely of the tokens that are shown."""
        if (place := lines.unlikely(self._tokens.tokens)) is not None:
            self.table.move_cursor(row=place)
        else:
            self.app.say("none of these tokens was sampled")


def _note(page: SessionPage) -> str:
    """How many sessions there are, how many of them are shown, and the policy that these share."""
    shown = len(page.sessions)
    note = counted(page.total, "session") + (f", the newest {shown:,} are shown" if shown < page.total else "")
    policies = {session.policy for session in page.sessions}
    note += f"; policy {policies.pop()}" if len(policies) == 1 else ""
    return note + (f"; {page.indexed:.0%} of the record is read" if page.indexed < 1 else "")
