"""`rolltap up`: a whole deployment on this machine, or nodes on a Ray cluster. `rolltap node`: a node here."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer

from rolltap.cli.common import (
    ConfigOption,
    UrlOption,
    complete_harness,
    complete_runtime,
    config_path,
    connect,
    interrupted_by_term,
    one_line_errors,
    signals_put_back,
)
from rolltap.cli.screen import say, working
from rolltap.cli.server_address import PlaneClient, claimed
from rolltap.deployment.description import FIRST_PORT, ports_from
from rolltap.deployment.local import LocalDeployment, LocalOptions
from rolltap.errors import ConfigError
from rolltap.extras import install_line
from rolltap.harnesses.client import AdminClient
from rolltap.harnesses.runner.attempts import Slots
from rolltap.harnesses.runner.node import NodeAgent, NodeSettings
from rolltap.harnesses.runner.specs import Defaults
from rolltap.network import is_loopback
from rolltap.settings import load_settings
from rolltap.wording import counted

LOOK_EVERY_S = 0.2


@one_line_errors
def up(
    local: Annotated[
        bool, typer.Option("--local", help="two proxies on Postgres and Redis behind nginx, on this machine")
    ] = False,
    address: Annotated[str | None, typer.Option("--ray", help="the Ray cluster's address, or `local`")] = None,
    config: ConfigOption = None,
    data: Annotated[
        Path | None, typer.Option(help="--local: folder of everything; default the settings' `data`")
    ] = None,
    port: Annotated[
        int, typer.Option(min=1, max=65_000, help="--local: the first port; nginx has three, the services the next 40")
    ] = FIRST_PORT,
    script: Annotated[
        Path | None, typer.Option(help="--local: answer from this script, not from the embedded engine")
    ] = None,
    no_redis: Annotated[bool, typer.Option("--no-redis", help="--local: on Postgres alone")] = False,
    slots: SlotsOption = 4,
    cpus: Annotated[float, typer.Option(min=0, help="--ray: CPUs declared for each node's actor")] = 1.0,
    harness: HarnessOption = "",
    runtime: RuntimeOption = "auto",
    workspaces: WorkspacesOption = None,
    snapshots: SnapshotsOption = None,
    url: UrlOption = None,
) -> None:
    """Runs a deployment for a small team (--local), or a node agent on every node of a Ray cluster, until stopped.

    The policies of --local are those of the settings file. Without one it starts the embedded engine.
    """
    if local == (address is not None):
        raise ConfigError("say what to start: --local, or a Ray cluster: --ray ADDRESS, or --ray local")
    if local:
        run_local(config_path(config), data, port, script, redis=not no_redis)
    else:
        assert address is not None
        defaults = Defaults(harness=harness, runtime=runtime, workspaces=workspaces, snapshots=snapshots)
        run_ray(address, config, url, slots, cpus, defaults)


def run_local(config: Path | None, data: Path | None, port: int, script: Path | None, *, redis: bool) -> None:
    """Runs until Ctrl-C, which aborts the calls in flight, or SIGTERM, which lets them end."""
    settings = load_settings(config, **({"data": data} if data is not None else {}))
    if settings.store.url:
        say(f"store.url of {config} is not used: --local has a Postgres of its own", err=True)
    options = LocalOptions(
        folder=settings.data,
        config=config if settings.policies else None,
        script=script,
        ports=ports_from(port),
        redis=redis,
    )
    if script is not None and options.config is not None:
        raise ConfigError(f"--script is for a start without policies in {config}")
    deployment = LocalDeployment(options)
    told_to_drain = False

    def drain(*_: object) -> None:
        nonlocal told_to_drain
        told_to_drain = True
        raise KeyboardInterrupt  # and no SIGINT, which a shell's background ignores

    with signals_put_back(signal.SIGTERM), claimed(settings.data) as listening:
        signal.signal(signal.SIGTERM, drain)
        try:
            with working("starting", if_stopped="the next start goes on with what is there") as report:
                deployment.start(report)
            listening.write(deployment.urls)
            _show(deployment)
            while True:
                for text in deployment.look():
                    say(text, err=True, style="yellow")
                time.sleep(LOOK_EVERY_S)
        except KeyboardInterrupt:
            drain_s = settings.limits.drain_s if told_to_drain else 0.0
            say("stopping: calls in flight may end" if drain_s else "stopping", err=True)
            deployment.stop(drain_s=drain_s)
        except BaseException:
            deployment.stop()
            raise


def _show(deployment: LocalDeployment) -> None:
    urls, folder = deployment.urls, deployment.folder
    say(f"agents:   {urls['agent']}")
    say(f"trainers: {urls['trainer']}")
    say(f"admin:    {urls['admin']}  (rolltap status, rolltap view; keys: {folder / 'keys.toml'})")
    if "prometheus" in deployment.children:
        say(f"metrics:  {deployment.layout.url('prometheus')}")
    else:
        say("metrics:  none, as prometheus is not installed")
    say(f"state and logs: {folder}; Ctrl-C stops everything")


def run_ray(address: str, config: Path | None, url: str | None, slots: int, cpus: float, defaults: Defaults) -> None:
    """Runs a node agent on every node of the cluster, until stopped."""
    check_cluster(address)
    try:
        from rolltap.harnesses.runner.ray_runner import RayRunner, RaySettings
    except ImportError as error:
        raise ConfigError(f"Ray is not installed; {install_line('ray')}") from error
    plane = connect("admin", config, url, role="runner")
    settings = RaySettings(
        admin_url=plane.url,
        key=plane.key,
        address=None if address == "local" else address,
        cpus=cpus,
        slots=slots_of(slots),
        defaults=defaults,
    )
    runner = RayRunner(settings)
    runner.connect()
    say(counted(runner.place(), "node"))
    with interrupted_by_term():  # Ray's own handler would exit at once
        try:
            runner.run()
        except KeyboardInterrupt:
            say("stopped")


def check_cluster(address: str) -> None:
    """`ConfigError` for a Ray cluster on other machines without token authentication: anyone who reaches its ports can
    run code there, and the runner's key passes through it."""
    host = urlsplit(address if "://" in address else f"//{address}").hostname or ""
    if address in ("local", "auto") or is_loopback(host) or os.environ.get("RAY_AUTH_MODE") == "token":
        return
    raise ConfigError(
        f"--ray {address}: the cluster's ports are open to whoever reaches them; start it with RAY_AUTH_MODE=token "
        "(Ray 2.52 or newer), and set that here too"
    )


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
SnapshotsOption = Annotated[
    Path | None, typer.Option(help="folder of the tasks' snapshots; default ~/.cache/rolltap/snapshots")
]


def slots_of(agents: int) -> Slots:
    """Slots for each stage in proportion to the agents: set-up and evaluation take less time."""
    return Slots(prepare=max(1, agents // 2), run=agents, evaluate=max(1, agents // 2), ahead=max(1, agents // 2))


@one_line_errors
def node(
    name: Annotated[str, typer.Option(help="this node's name; default host and process")] = "",
    slots: SlotsOption = 4,
    harness: HarnessOption = "",
    runtime: RuntimeOption = "auto",
    workspaces: WorkspacesOption = None,
    snapshots: SnapshotsOption = None,
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
    defaults = Defaults(harness=harness, runtime=runtime, workspaces=workspaces, snapshots=snapshots)
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
    if stop.is_set():
        say("stopped; rollouts that had not ended go to another node")
