"""`rolltap view`: the record in a browser, of a running server or of a store by itself; or as one HTML file."""

from __future__ import annotations

import asyncio
import secrets
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rolltap.cli.common import ConfigOption, UrlOption, config_path, connect, one_line_errors
from rolltap.cli.screen import say
from rolltap.errors import ConfigError

if TYPE_CHECKING:
    from rolltap.reading import RecordReader, Vocabulary
    from rolltap.settings import Settings


@one_line_errors
def view(
    what: Annotated[
        str | None, typer.Argument(help="a store to open without a server; with --html, a session or a group")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="write one file that shows it anywhere, instead of a page")] = None,
    store: Annotated[str, typer.Option(help="with --html: the store to read; default the settings' store")] = "",
    tokenizer: Annotated[
        list[str] | None, typer.Option(help="POLICY=FOLDER, or FOLDER for all; default the settings' tokenizers")
    ] = None,
    port: Annotated[int, typer.Option(help="with a store: the port; 0 takes a free one")] = 0,
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
            raise ConfigError("--html: name the session or group to write")
        if html.exists():
            raise ConfigError(f"--html: {html} exists; choose another name")
        settings = load_settings(config_path(config))
        page = asyncio.run(_page(store or settings.store_url, tokenizer or (), settings, what))
        html.write_text(page, encoding="utf-8")
        say(f"{html} ({html.stat().st_size / 1e6:.1f} MB)")
    elif what is not None:
        asyncio.run(_serve(store_of(what), tokenizer or (), load_settings(config_path(config)), port, browser))
    else:
        plane = connect("admin", config, url)
        _show(plane.url + plane.call("POST", "/view/links")["path"], browser)


def store_of(text: str) -> str:
    """A store's URL, of one or of a SQLite file or the folder that holds `rolltap.db`."""
    if "://" in text:
        return text
    path = Path(text)
    path = path / "rolltap.db" if path.is_dir() else path
    if not path.is_file():
        raise ConfigError(f"{text}: no such store; name a rolltap.db, its folder, or a postgresql:// URL")
    return f"sqlite:///{path.absolute()}"


def _show(link: str, browser: bool) -> None:
    say(link)
    say("works once, within 15 minutes", err=True, style="bright_black")
    if browser:
        webbrowser.open(link)


class TokenizerFolders:
    """The tokenizers by policy: those that the command names, else those of the settings. Read when first asked for."""

    def __init__(self, named: Sequence[str], settings: Settings) -> None:
        self._folders = {name: policy.tokenizer for name, policy in settings.policies.items() if policy.tokenizer}
        self._default = ""
        for text in named:
            policy, given, folder = text.rpartition("=")
            if given:
                self._folders[policy] = folder
            else:
                self._folders, self._default = {}, folder
        self._known: dict[str, Vocabulary] = {}

    def of_policy(self, policy: str) -> Vocabulary | None:
        from rolltap.reading import folder_vocabulary

        folder = self._folders.get(policy, self._default)
        if folder and folder not in self._known:
            self._known[folder] = folder_vocabulary(Path(folder))
        return self._known.get(folder)


async def _serve(store: str, named: Sequence[str], settings: Settings, port: int, browser: bool) -> None:
    """Serves the pages of a store on the loopback address until interrupted."""
    from rolltap.cli.export import policy_rules
    from rolltap.proxy.server import bind, serve
    from rolltap.proxy.viewer.access import Access
    from rolltap.proxy.viewer.app import alone
    from rolltap.proxy.viewer.pages import Pages
    from rolltap.reading import opened_reader

    vocabularies = TokenizerFolders(named, settings)
    rules = policy_rules(settings, ())
    async with opened_reader(store, rules=rules, vocabulary=vocabularies.of_policy) as reader:
        access = Access(secrets.token_hex(16))
        socket = bind("127.0.0.1", port)
        link = f"http://127.0.0.1:{socket.getsockname()[1]}/view/open?token={access.new_link()}"
        asyncio.get_running_loop().call_later(0.3, _show, link, browser)
        await serve({"viewer": (alone(Pages(reader, _name_of(reader)), access), socket)}, asyncio.Event())


async def _page(store: str, named: Sequence[str], settings: Settings, what: str) -> str:
    from rolltap.cli.export import policy_rules
    from rolltap.proxy.viewer.one_file import one_file
    from rolltap.reading import opened_reader

    vocabularies = TokenizerFolders(named, settings)
    async with opened_reader(store, rules=policy_rules(settings, ()), vocabulary=vocabularies.of_policy) as reader:
        return await one_file(reader, what)


def _name_of(reader: RecordReader) -> str:
    """The store as pages show it, without its password."""
    return reader.log.database.name
