"""`rolltap node`: a machine that runs the ledger's rollouts."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from pathlib import Path
from typing import Annotated

import typer

from rolltap.cli.client import PlaneClient
from rolltap.cli.common import ConfigOption, UrlOption, connect, one_line_errors, signals_put_back
from rolltap.cli.completion import complete_harness, complete_runtime
from rolltap.cli.screen import say
from rolltap.harnesses.attempts import Slots
from rolltap.harnesses.client import AdminClient
from rolltap.harnesses.node import NodeAgent, NodeSettings
from rolltap.harnesses.specs import Defaults

HarnessOption = Annotated[
    str, typer.Option(help="default harness, for tasks without one", autocompletion=complete_harness)
]
RuntimeOption = Annotated[
    str,
    typer.Option(
        help="default runtime, for tasks without one; auto: bubblewrap; fails without it",
        autocompletion=complete_runtime,
    ),
]
SlotsOption = Annotated[int, typer.Option(min=1, help="agents at once")]
WorkspacesOption = Annotated[Path | None, typer.Option(help="folder of the working copies; default the temporary one")]


def slots_of(agents: int) -> Slots:
    """Stages in proportion to the agents: setting up and evaluating are shorter."""
    return Slots(prepare=max(1, agents // 2), run=agents, evaluate=max(1, agents // 2), ahead=max(1, agents // 2))


@one_line_errors
def node(
    name: Annotated[str, typer.Option(help="this node's name; default host and process")] = "",
    slots: SlotsOption = 4,
    harness: HarnessOption = "",
    runtime: RuntimeOption = "auto",
    workspaces: WorkspacesOption = None,
    until_idle: Annotated[bool, typer.Option(help="end when there is nothing left to run")] = False,
    url: UrlOption = None,
    config: ConfigOption = None,
) -> None:
    """Claims rollouts from the server and runs them on this machine, until stopped.

    The key is ROLLTAP_RUNNER_KEY, which gives access only to this node's claims; on the server's machine it may be left
    out.
    """
    plane = connect("admin", config, url, role="runner")
    settings = NodeSettings(name or f"{socket.gethostname()}-{os.getpid()}", slots_of(slots))
    defaults = Defaults(harness=harness, runtime=runtime, workspaces=workspaces)
    with signals_put_back(signal.SIGINT, signal.SIGTERM):
        asyncio.run(run_node(plane, settings, defaults, until_idle=until_idle))


async def run_node(plane: PlaneClient, settings: NodeSettings, defaults: Defaults, *, until_idle: bool) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    say(f"node {settings.name}: {settings.slots.run} agents at once, from {plane.url}")
    async with AdminClient(plane.url, plane.key) as client:
        await NodeAgent(client, settings, defaults).run(stop, until_idle=until_idle)
