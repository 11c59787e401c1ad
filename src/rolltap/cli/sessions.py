"""`rolltap sessions`: open, show, list and close sessions of a running server."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.tree import Tree

from rolltap.cli.client import PlaneClient
from rolltap.cli.common import one_line_errors
from rolltap.errors import ConfigError

app = typer.Typer(help="Open, show, list and close sessions of a running server.", no_args_is_help=True)

JsonOption = Annotated[bool, typer.Option("--json", help="print JSON")]


@app.command("open")
@one_line_errors
def open_(
    policy: Annotated[str | None, typer.Option(help="policy; default the only one")] = None,
    tag: Annotated[list[str] | None, typer.Option(help="NAME=VALUE, several times")] = None,
    as_json: JsonOption = False,
) -> None:
    """Opens a session and prints its key, once."""
    for text in tag or []:
        if "=" not in text:
            raise ConfigError(f"--tag: want NAME=VALUE, not {text!r}")
    tags = dict(text.split("=", 1) for text in tag or [])
    body = {"tags": tags} | ({"policy": policy} if policy else {})
    session = PlaneClient("admin").call("POST", "/sessions", body)
    if as_json:
        typer.echo(json.dumps(session))
        return
    base = session["base_url"]
    typer.echo(f"# session {session['session_id']}; the key is shown only now")
    typer.echo(f"export OPENAI_BASE_URL={base}/v1 OPENAI_API_KEY={session['key']}")
    typer.echo(f"export ANTHROPIC_BASE_URL={base} ANTHROPIC_API_KEY={session['key']}")
    typer.echo(f"export GOOGLE_GEMINI_BASE_URL={base} GEMINI_API_KEY={session['key']}")


@app.command("list")
@one_line_errors
def list_(as_json: JsonOption = False) -> None:
    """The newest sessions."""
    sessions = PlaneClient("admin").call("GET", "/sessions")["sessions"]
    if as_json:
        typer.echo(json.dumps(sessions))
        return
    table = Table("session", "policy", "rollout", "state", "tags")
    for row in sessions:
        state = "closed" if row["closed_at"] else "open"
        tags = " ".join(f"{name}={value}" for name, value in row["tags"].items())
        table.add_row(row["id"], row["policy"], row["rollout_id"] or "", state, tags)
    Console().print(table)


@app.command()
@one_line_errors
def show(session: str, as_json: JsonOption = False) -> None:
    """A session's forest of calls: parents, breaks, tokens, outcomes."""
    found = PlaneClient("admin").call("GET", f"/sessions/{session}")
    if as_json:
        typer.echo(json.dumps(found))
        return
    tree = Tree(f"session {found['id']} (policy {found['policy']})")
    branches = {None: tree}
    for call in found["calls"]:
        parent = branches.get(call["parent_id"], tree)
        branches[call["id"]] = parent.add(_line(call))
    Console().print(tree)


def _line(call: dict) -> str:
    text = (
        f"{call['id'][-6:]} {call['kind']} {call['outcome']}: {call['prompt_tokens']} + {call['output_tokens']} tokens"
    )
    if call.get("shared"):
        text += f", continues {call['shared']}"
    if call.get("break"):
        text += f" [yellow]break: {call['break']['reason']} at token {call['break']['token_index']}[/]"
    if call.get("flaw"):
        text += f" [red]{call['flaw']}[/]"
    return text


@app.command()
@one_line_errors
def close(session: str) -> None:
    """Closes a session: later calls with its key get 409."""
    PlaneClient("admin").call("POST", f"/sessions/{session}/close")
    typer.echo(f"session {session} is closed")
