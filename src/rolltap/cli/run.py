"""`rolltap run`: one harness under a fresh session in this folder, or whole task files."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from rolltap.cli.client import PlaneClient
from rolltap.cli.common import ConfigOption, UrlOption, connect, one_line_errors
from rolltap.cli.screen import Screen
from rolltap.cli.tasks import Work, run_tasks
from rolltap.errors import RolltapError, TaskInvalid
from rolltap.harnesses.base import Ending, Exit, Harness, Job, Limits, PythonCall
from rolltap.harnesses.client import AdminClient, OpenedSession
from rolltap.harnesses.install import find
from rolltap.harnesses.registry import get_harness
from rolltap.harnesses.runtimes.here import runtime_here
from rolltap.harnesses.sources import Empty
from rolltap.harnesses.specs import Defaults

POLL_S = 0.3
RUNTIME_HELP = "tasks: thread, process, bubblewrap, docker, apptainer; auto: bubblewrap, or a refusal"
POLICY_HELP = "policy that answers; default the only one; tasks: also ROLE=NAME,ROLE=NAME, where several play"
AGENT_S = 24 * 3600.0
OWN_LIMITS = Limits(agent_s=AGENT_S, memory_mb=1 << 20, disk_mb=1 << 30)  # the folder and the machine are the user's

console = Screen(highlight=False)


@one_line_errors
def run(
    target: Annotated[str, typer.Argument(help="a harness, or a file or folder of tasks")],
    words: Annotated[list[str] | None, typer.Argument(help="after `--`: the prompt (`command`: its argv)")] = None,
    harness: Annotated[str, typer.Option(help="tasks: the harness, where a task names none")] = "",
    policy: Annotated[str, typer.Option(help=POLICY_HELP)] = "",
    n: Annotated[int, typer.Option("--n", "-n", min=1, help="tasks: rollouts a task")] = 1,
    runtime: Annotated[str, typer.Option(help=RUNTIME_HELP)] = "auto",
    slots: Annotated[int, typer.Option(min=1, help="tasks: agents at once")] = 4,
    dialect: Annotated[str, typer.Option(help="protocol, for harnesses that speak several")] = "",
    repositories: Annotated[Path | None, typer.Option(help="tasks: folder of SWE-style repositories")] = None,
    usable: Annotated[int | None, typer.Option(help="tasks: enough usable rollouts to end a group early")] = None,
    priority: Annotated[int, typer.Option(help="tasks: the greater goes first")] = 0,
    id: Annotated[str, typer.Option(help="tasks: the submission's id; a known id resumes that submission")] = "",
    nodes: Annotated[bool, typer.Option("--nodes", help="tasks: leave the running to nodes, and follow")] = False,
    no_sandbox: Annotated[
        bool, typer.Option("--no-sandbox", help="a harness: outside the sandbox, with its own approvals off")
    ] = False,
    detach: Annotated[bool, typer.Option("--detach", help="tasks: submit for nodes, and end")] = False,
    url: UrlOption = None,
    config: ConfigOption = None,
) -> None:
    """Runs a harness on a prompt in this folder, or a file of tasks, and shows the calls.

    rolltap run codex -- "fix the failing test"  ·  rolltap run tasks.jsonl --harness codex --n 8
    """
    if not Path(target).exists() and (Path(target).suffix or "/" in target):
        raise TaskInvalid(f"{target}: no such file or folder of tasks")
    plane = connect("admin", config, url)
    if Path(target).exists():
        here = not (nodes or detach)
        work = Work(Path(target), n, slots, policy, repositories, usable, priority, id, here=here, detach=detach)
        defaults = Defaults(base=_folder(Path(target)), harness=harness, dialect=dialect, runtime=runtime,
                            argv=tuple(words or ()))  # fmt: skip
        failed = asyncio.run(run_tasks(plane, work, defaults))
    else:
        chosen = get_harness(target, dialect=dialect, argv=tuple(words or ()))
        prompt = "" if target == "command" else " ".join(words or ())
        failed = asyncio.run(run_one(plane, chosen, prompt, policy, unsandboxed=no_sandbox))
    raise typer.Exit(1 if failed else 0)


def _folder(path: Path) -> Path:
    return (path if path.is_dir() else path.parent).resolve()


async def run_one(plane: PlaneClient, harness: Harness, prompt: str, policy: str, *, unsandboxed: bool = False) -> bool:
    """Runs `harness` here under a fresh session; True if it failed."""
    if not prompt and harness.package is not None:
        raise TaskInvalid(f"no prompt: rolltap run {harness.name} -- PROMPT")
    installation = find(harness.package) if harness.package else None
    runtime, notice = runtime_here(harness, installation, unsandboxed=unsandboxed)
    if notice:
        console.print(notice)
    async with AdminClient(plane.url, plane.key) as client:
        session = await client.open_session(policy=policy, tags={"harness": harness.name})
        console.print(f"session {session.session_id} · {harness.name} · rolltap sessions show to see it again")
        workspace = await runtime.prepare(Empty())
        try:
            job = Job(workspace.endpoint(session.endpoint), prompt, workspace.workdir, workspace.home, OWN_LIMITS)
            launch = harness.launch(job)
            if isinstance(launch, PythonCall):
                raise TaskInvalid(f"{harness.name} runs inside the runner only; use mini-swe-agent")
            seen: set[str] = set()
            watch = asyncio.create_task(_watch(client, session, seen))
            try:
                exit_ = await workspace.run(launch, job.limits, AGENT_S, reach=session.endpoint.base_url)
            finally:
                watch.cancel()
                with suppress(asyncio.CancelledError):
                    await watch
            await client.close_session(session.session_id)
            await _show_new_calls(client, session, seen)
        finally:
            await workspace.close()
    return _tell(exit_, len(seen))


def _tell(exit_: Exit, calls: int) -> bool:
    console.print(exit_.output.rstrip())
    console.print(f"{exit_.ending.value} after {exit_.seconds:.1f} s and {calls} calls")
    return exit_.ending not in (Ending.DONE, Ending.LIMIT)


async def _watch(client: AdminClient, session: OpenedSession, seen: set[str]) -> None:
    """Prints each call of the session as it ends, until cancelled."""
    while True:
        await _show_new_calls(client, session, seen)
        await asyncio.sleep(POLL_S)


async def _show_new_calls(client: AdminClient, session: OpenedSession, seen: set[str]) -> None:
    with suppress(RolltapError):
        found = await client.get(f"/sessions/{session.session_id}")
        for call in found["calls"]:
            if call["id"] not in seen and call["outcome"]:
                seen.add(call["id"])
                console.print(_call_line(len(seen), call))


def _call_line(number: int, call: dict[str, Any]) -> str:
    text = f"call {number}: {call['prompt_tokens']} + {call['output_tokens']} tokens, {call['outcome']}"
    if call.get("break"):
        text += f" ({call['break']['reason']})"
    return text
