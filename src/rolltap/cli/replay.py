"""`rolltap replay`: a recorded rollout again, answered from the record."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from rolltap.cli.common import ConfigOption, UrlOption, complete_runtime, connect, one_line_errors
from rolltap.cli.screen import say
from rolltap.cli.server_address import PlaneClient
from rolltap.harnesses.client import AdminClient
from rolltap.harnesses.runner.replay import ReplayReport, replay
from rolltap.harnesses.runner.specs import Defaults


@one_line_errors
def replay_rollout(
    rollout: Annotated[str, typer.Argument(help="a rollout's id")],
    runtime: Annotated[
        str, typer.Option(help="for a task that names none: where the agent runs", autocompletion=complete_runtime)
    ] = "auto",
    url: UrlOption = None,
    config: ConfigOption = None,
) -> None:
    """Runs a recorded rollout's harness again, for debugging: the record answers its calls, no engine is asked.

    Ends with 0 if the harness sends what it sent then. Else it stops at the first difference and prints both sides.
    """
    defaults = Defaults(base=Path.cwd(), runtime=runtime)
    report = asyncio.run(_replay(connect("admin", config, url), rollout, defaults))
    say(str(report))
    if not report.same:
        raise typer.Exit(1)


async def _replay(plane: PlaneClient, rollout: str, defaults: Defaults) -> ReplayReport:
    async with AdminClient(plane.url, plane.key) as client:
        return await replay(client, rollout, defaults)
