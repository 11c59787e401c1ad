"""`rolltap node` and `rolltap up --ray`: machines that run the ledger's rollouts."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer

from rolltap.addresses import is_loopback
from rolltap.cli.client import PlaneClient
from rolltap.cli.common import ConfigOption, UrlOption, connect, one_line_errors
from rolltap.cli.completion import complete_harness, complete_runtime
from rolltap.cli.screen import say
from rolltap.counted import counted
from rolltap.errors import ConfigError
from rolltap.extras import install_line
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
    asyncio.run(run_node(plane, settings, defaults, until_idle=until_idle))


async def run_node(plane: PlaneClient, settings: NodeSettings, defaults: Defaults, *, until_idle: bool) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    say(f"node {settings.name}: {settings.slots.run} agents at once, from {plane.url}")
    async with AdminClient(plane.url, plane.key) as client:
        await NodeAgent(client, settings, defaults).run(stop, until_idle=until_idle)


@one_line_errors
def up(
    address: Annotated[str | None, typer.Option("--ray", help="the Ray cluster's address, or `local`")] = None,
    slots: SlotsOption = 4,
    cpus: Annotated[float, typer.Option(help="CPUs declared for each node's actor")] = 1.0,
    harness: HarnessOption = "",
    runtime: RuntimeOption = "auto",
    workspaces: WorkspacesOption = None,
    url: UrlOption = None,
    config: ConfigOption = None,
) -> None:
    """Runs one node agent on every node of a Ray cluster, until stopped."""
    if address is None:
        raise ConfigError("say which Ray cluster: --ray ADDRESS, or --ray local")
    check_cluster(address)
    try:
        from rolltap.harnesses.ray_runner import RayRunner, RaySettings
    except ImportError as error:
        raise ConfigError(f"Ray is not installed; {install_line('ray')}") from error
    plane = connect("admin", config, url, role="runner")
    settings = RaySettings(
        admin_url=plane.url,
        key=plane.key,
        address=None if address == "local" else address,
        cpus=cpus,
        slots=slots_of(slots),
        defaults=Defaults(harness=harness, runtime=runtime, workspaces=workspaces),
    )
    runner = RayRunner(settings)
    runner.connect()
    say(counted(runner.place(), "node"))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # Ray has its own handler, which leaves at once
    try:
        runner.run()
    except KeyboardInterrupt:
        say("stopped")


def check_cluster(address: str) -> None:
    """`ConfigError` for a Ray cluster on other machines without tokens: whoever reaches its ports runs code there, and
    the runner's key travels through it."""
    host = urlsplit(address if "://" in address else f"//{address}").hostname or ""
    if address in ("local", "auto") or is_loopback(host) or os.environ.get("RAY_AUTH_MODE") == "token":
        return
    raise ConfigError(
        f"--ray {address}: the cluster's ports are open to whoever reaches them; start it with RAY_AUTH_MODE=token "
        "(Ray 2.52 or newer), and set that here too"
    )
