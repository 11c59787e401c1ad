"""`rolltap view`: shows the record of a running server or of a store in a browser, or writes it as an HTML file."""

from __future__ import annotations

import asyncio
import secrets
import webbrowser
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rolltap.cli.common import ConfigOption, UrlOption, config_path, connect, one_line_errors
from rolltap.cli.screen import say
from rolltap.errors import ConfigError
from rolltap.settings import STORE_HELP, store_url

if TYPE_CHECKING:
    from rolltap.reading.tokens import Vocabulary
    from rolltap.settings import Settings


@one_line_errors
def view(
    what: Annotated[
        str | None, typer.Argument(help="a store to open without a server; with --html, a session, a group or a policy")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="write one file that shows it anywhere, instead of a page")] = None,
    store: Annotated[str, typer.Option(help=f"with --html: {STORE_HELP}")] = "",
    tokenizer: Annotated[
        list[str] | None, typer.Option(help="POLICY=FOLDER, or FOLDER for all; default the settings' tokenizers")
    ] = None,
    metrics: Annotated[
        list[str] | None,
        typer.Option(help="POLICY=FILE, or FILE for all: a trainer's metrics.jsonl; default the settings' files"),
    ] = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="with a store: the port; 0: the store's usual or any free one")
    ] = 0,
    browser: Annotated[bool, typer.Option(help="open the page in a browser")] = True,
    url: UrlOption = None,
    config: ConfigOption = None,
) -> None:
    """Shows sessions, tokens, groups and runs in a browser.

    Without arguments it asks the running server for a link; with a store (a file or a URL) it serves the pages itself.
    """
    from rolltap.settings import load_settings

    if html is not None:
        if what is None:
            raise ConfigError("--html: name the session, the group or the policy to write")
        if html.exists():
            raise ConfigError(f"--html: {html} exists; choose another name")
        settings = load_settings(config_path(config))
        files = metrics_files(metrics or (), settings)
        url_of_store = store_url(store) if store else settings.store_url
        page = asyncio.run(_page(url_of_store, tokenizer or (), settings, what, files))
        html.touch(mode=0o600)  # it holds what is on record
        html.write_text(page, encoding="utf-8")
        say(f"{html} ({html.stat().st_size / 1e6:.1f} MB)")
    elif what is not None:
        settings = load_settings(config_path(config))
        files = metrics_files(metrics or (), settings)
        asyncio.run(_serve(store_url(what), tokenizer or (), settings, files, port, browser))
        say("stopped", err=True)
    else:
        plane = connect("admin", config, url)
        _show(plane.view_link(), browser)


def _show(link: str, browser: bool) -> None:
    say(link)
    say("works once, within 15 minutes", err=True, style="bright_black")
    if browser:
        webbrowser.open(link)


class TokenizerFolders:
    """The tokenizer of each policy: from the command line, else from the settings; loaded lazily."""

    def __init__(self, named: Sequence[str], settings: Settings) -> None:
        self._folders = {name: policy.tokenizer for name, policy in settings.policies.items() if policy.tokenizer}
        self._default = ""
        for text in named:
            policy, equals, folder = text.rpartition("=")
            if equals:
                self._folders[policy] = folder
            else:
                self._folders, self._default = {}, folder
        self._known: dict[str, Vocabulary] = {}

    def of_policy(self, policy: str) -> Vocabulary | None:
        from rolltap.reading.reader import folder_vocabulary

        folder = self._folders.get(policy, self._default)
        if folder and folder not in self._known:
            self._known[folder] = folder_vocabulary(Path(folder))
        return self._known.get(folder)


def metrics_files(named: Sequence[str], settings: Settings) -> dict[str, Path]:
    """The trainer's metrics file of each policy: from the command line, else from the settings."""
    from rolltap.reading.runs import step_files

    files = {} if named else step_files(settings)
    for text in named:
        policy, _, file = text.rpartition("=")
        path = Path(file).expanduser()
        if not path.is_file():
            raise ConfigError(f"--metrics: no file {file}; a trainer of rolltap writes OUT/metrics.jsonl")
        files[policy] = path
    return files


def usual_port(store: str) -> int:
    """Returns a port that only the store's URL decides: a browser keeps named filters and the theme by address."""
    return 20_000 + zlib.crc32(store.encode()) % 10_000


async def _serve(
    store: str, named: Sequence[str], settings: Settings, metrics: Mapping[str, Path], port: int, browser: bool
) -> None:
    """Serves the pages of a store on the loopback address until interrupted."""
    from rolltap.cli.export import policy_rules
    from rolltap.proxy.reading_process.questions import AskHere
    from rolltap.proxy.server import bind, serve
    from rolltap.proxy.viewer.app import Access, standalone_app
    from rolltap.proxy.viewer.listing import Selections
    from rolltap.proxy.viewer.one_file import SavedPages
    from rolltap.proxy.viewer.pages import Pages
    from rolltap.reading.reader import opened_reader

    vocabularies = TokenizerFolders(named, settings)
    rules = policy_rules(settings, ())
    async with opened_reader(store, rules=rules, vocabulary=vocabularies.of_policy, metrics=metrics) as reader:
        pages = Pages(reader, reader.log.database.name, standalone=True)
        ask = AskHere(pages, SavedPages(reader), Selections(reader))
        access = Access(secrets.token_hex(16))
        try:
            socket = bind("127.0.0.1", port or usual_port(store))
        except ConfigError:
            if port:
                raise
            socket = bind("127.0.0.1", 0)
        link = f"http://127.0.0.1:{socket.getsockname()[1]}/view/open?token={access.new_link()}"
        asyncio.get_running_loop().call_later(0.3, _show, link, browser)
        await serve({"viewer": (standalone_app(ask, access, reader.note), socket)}, asyncio.Event())


async def _page(store: str, named: Sequence[str], settings: Settings, what: str, metrics: Mapping[str, Path]) -> str:
    from rolltap.cli.export import policy_rules
    from rolltap.proxy.viewer.one_file import one_file
    from rolltap.reading.reader import opened_reader

    vocabularies = TokenizerFolders(named, settings)
    rules = policy_rules(settings, ())
    async with opened_reader(store, rules=rules, vocabulary=vocabularies.of_policy, metrics=metrics) as reader:
        return await one_file(reader, what)
