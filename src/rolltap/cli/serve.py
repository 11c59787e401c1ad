"""`rolltap serve`: reads the settings, starts the three planes, and prints where they are."""

from __future__ import annotations

import asyncio
import logging
import shlex
import signal
import ssl
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from socket import socket as Socket
from typing import Any

from rich.table import Table

from rolltap.cli.common import past_proxies, signals_put_back
from rolltap.cli.screen import Screen, json_only
from rolltap.cli.server_address import Listening
from rolltap.errors import ConfigError
from rolltap.extras import page
from rolltap.settings import PlaneName, Settings, hide_password, load_settings

log = logging.getLogger("rolltap.serve")

VENDORS: dict[str, dict[str, Any]] = {
    "anthropic": {"url": "https://api.anthropic.com", "dialects": ("anthropic",)},
    "openai": {
        "url": "https://api.openai.com/v1",
        "dialects": ("openai_responses", "openai_chat", "openai_completions"),
    },
    "gemini": {"url": "https://generativelanguage.googleapis.com", "dialects": ("gemini",)},
}
"""The vendors that `serve --capture` relays to if no engine is named."""


def settings_from(path: Path | None, quick: dict[str, Any], data: Path | None, *, capture: bool = False) -> Settings:
    """The settings of the file, or those of a single policy on the engine that `quick` names.

    `quick` holds the options engine, kind, tokenizer, family, policy and model; None: not given. With `capture` and
    neither file nor engine, every protocol's own vendor is served. `ConfigError` for an option that needs --engine.
    """
    overrides: dict[str, Any] = {"data": data} if data is not None else {}
    named = {name: str(value) for name, value in quick.items() if value is not None}
    engine = named.pop("engine", "")
    if named and not engine:
        raise ConfigError(
            f"--{next(iter(named))} needs --engine URL; without it, a settings file says what is served, or --capture "
            "relays to the vendors"
        )
    if engine:
        overrides["engines"] = {"main": {"kind": named.pop("kind", "vllm"), "url": engine}}
        overrides["policies"] = {named.pop("policy", "default"): {"engine": "main", **named}}
    elif path is None and capture:
        overrides["engines"] = {name: {"kind": "passthrough", **vendor} for name, vendor in VENDORS.items()}
        overrides["policies"] = {name: {"engine": name} for name in VENDORS}
    elif path is None:
        raise ConfigError(
            "nothing to serve: give --engine URL --tokenizer FOLDER, or --capture to record calls to the vendors, "
            f"or write a rolltap.toml: `rolltap config init` ({page('settings')})"
        )
    return load_settings(path, **overrides)


def listening(settings: Settings, options: Mapping[str, str | int | None]) -> Settings:
    """The settings, with the keys of `listen` that the command line names."""
    named = {name: value for name, value in options.items() if value is not None}
    return settings.model_copy(update={"listen": settings.listen.model_copy(update=named)})


def serve_all(settings: Settings, workers_option: str, *, capture: bool) -> int:
    """Serves until interrupted, in as many processes as `worker_count` makes of the option; the exit code."""
    import uvloop

    from rolltap.cli.server_address import claimed
    from rolltap.cli.workers import counts_of, serve_with_workers, worker_count
    from rolltap.proxy.metrics.workers import remove_counts

    workers = worker_count(workers_option, settings)
    with claimed(settings.data) as listening:
        check_start(settings, shared=workers > 1)
        if workers == 1:
            with signals_put_back(signal.SIGINT, signal.SIGTERM):
                uvloop.run(run(settings, listening, capture=capture))
            return 0

        remove_counts(counts_of(settings.data))

        def serve(shared: Settings, number: int) -> None:
            uvloop.run(run(shared, listening, capture=capture, worker=number, workers=workers))

        return serve_with_workers(settings, workers, serve)


def check_start(settings: Settings, *, shared: bool) -> None:
    """`ConfigError` if a tokenizer or the TLS certificate can't be read, or a port is taken.

    Nothing is created before: no keys, store or spool.
    """
    from rolltap.proxy.call.open_policies import check_tokenizers
    from rolltap.proxy.server import bind

    check_tokenizers(settings)
    listen = settings.listen
    if listen.tls_certificate:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(listen.tls_certificate, listen.tls_key or None)
        except OSError as error:
            reason = error.strerror or error
            raise ConfigError(f"listen.tls_certificate, tls_key: can't be read as PEM files: {reason}") from error
    taken: dict[tuple[str, int], PlaneName] = {}
    for plane, port in _ports(settings).items():
        other = taken.setdefault((listen.host_of(plane), port), plane)
        if port and other != plane:
            raise ConfigError(f"the {other} and the {plane} plane both have port {port}: each needs one of its own")
    with ExitStack() as held:
        for plane, port in _ports(settings).items():
            held.enter_context(bind(listen.host_of(plane), port, shared=shared))


def _ports(settings: Settings) -> dict[PlaneName, int]:
    listen = settings.listen
    return {"agent": listen.agent_port, "trainer": listen.trainer_port, "admin": listen.admin_port}


async def run(settings: Settings, listening: Listening, *, capture: bool, worker: int = 0, workers: int = 1) -> None:
    """Serves until interrupted, as one of `workers` on the same ports; the first one prints the addresses."""
    from rolltap.cli.workers import counts_of, spool_of, spools_beside
    from rolltap.harnesses.runner.specs import check
    from rolltap.proxy.app import Rolltap
    from rolltap.proxy.server import Calls, Front, bind, serve

    listen = settings.listen
    spool, beside = spool_of(settings.data, worker), spools_beside(settings.data, worker, workers)
    counts = counts_of(settings.data) if workers > 1 else None
    async with Rolltap.running(settings, check_task=check, spool=spool, spools_beside=beside, counts=counts) as app:
        sockets: dict[PlaneName, Socket] = {
            plane: bind(listen.host_of(plane), port, shared=workers > 1) for plane, port in _ports(settings).items()
        }
        urls: dict[PlaneName, str] = {
            plane: listen.url_of(plane, socket.getsockname()[1]) for plane, socket in sockets.items()
        }
        app.set_base_url(listen.public_url or urls["agent"])
        listening.write(urls)
        console = Screen(stderr=True, quiet=worker > 0 or json_only())
        console.print(_banner(app, urls))
        open_to_all = not console.is_terminal  # for a journal or `docker logs`: no link, no key
        link = "rolltap view" if open_to_all else f"{urls['admin']}/view/open?token={app.view_access.new_link()}"
        console.print(f"look at it: {link}", soft_wrap=True, highlight=False, markup=False)
        if json_only() and worker == 0:
            log.info("rolltap is up", extra={"planes": urls, "record": hide_password(app.settings.store_url)})
        if capture:  # not in a table: a terminal must not cut text to be copied
            shown = stored_key(app.settings) if open_to_all else None
            for line in exports(app.settings, app.base_url, shown):
                console.print(line, soft_wrap=True, highlight=False)
        planes = {plane: (app.planes[plane], socket) for plane, socket in sockets.items()}
        await serve(planes, asyncio.Event(), Front(settings.limits, listen), Calls(app.begin_stop, app.cut_calls))
    console.print(f"stopped; the record stays: {hide_password(settings.store_url)}", soft_wrap=True, highlight=False)


def _banner(app: Any, urls: Mapping[PlaneName, str]) -> Table:
    table = Table(title="rolltap is up", show_header=False, title_justify="left")
    for plane, url in urls.items():
        table.add_row(f"{plane} plane", url)
    table.add_row("record", hide_password(app.settings.store_url))
    table.add_row("keys", str(app.settings.data / "keys.toml"))
    for policy in app.policies:
        table.add_row(f"policy {policy.name}", f"{policy.engine.name}: {policy.settings.model or policy.name}")
    return table


def stored_key(settings: Settings) -> str:
    """A shell expression for the project's key: it reads the data folder's file when the line runs."""
    return f"$(sed -n 's/^project = //p' {shlex.quote(str(settings.data.absolute() / 'keys.toml'))} | tr -d '\"')"


def exports(settings: Settings, url: str, shown_key: str | None = None) -> list[str]:
    """The variables to export so that a harness's calls are captured, by the protocol that it speaks.

    If calls go to a vendor with the user's own key, that key is not replaced. `shown_key` is printed for the project's
    key.
    """
    from rolltap.protocols.dialects import client_environments

    key = shown_key or settings.keys.project
    own = [engine for engine in settings.engines.values() if engine.kind == "passthrough" and not engine.api_key]
    lines: list[str] = []
    codex = ""
    for client, speaking in client_environments().items():
        line = f"export {client.base_url}={url}{client.path}"
        relayed = any(not engine.dialects or not speaking.isdisjoint(engine.dialects) for engine in own)
        lines.append(line if relayed else f"{line} {client.key}={key}")
        if "openai_responses" in speaking:
            codex = "codex" if relayed else f"CODEX_API_KEY={key} codex exec"
    return [*lines, *past_proxies(url), f"{codex} -c openai_base_url={url}/v1  # Codex reads no OPENAI_BASE_URL"]
