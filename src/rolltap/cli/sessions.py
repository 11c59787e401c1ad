"""`rolltap sessions`: open, show, list and close sessions of a running server."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from rolltap.cli.common import ConfigOption, JsonOption, UrlOption, connect, one_line_errors
from rolltap.cli.screen import Screen, say
from rolltap.errors import ConfigError

app = typer.Typer(help="Open, show, list and close sessions of a running server.", no_args_is_help=True)


@app.command("open")
@one_line_errors
def open_(
    policy: Annotated[str | None, typer.Option(help="policy; default the only one")] = None,
    tag: Annotated[list[str] | None, typer.Option(help="NAME=VALUE, several times")] = None,
    as_json: JsonOption = False,
    url: UrlOption = None,
    config: ConfigOption = None,
) -> None:
    """Opens a session and prints its key, which is shown only once."""
    for text in tag or []:
        if "=" not in text:
            raise ConfigError(f"--tag: want NAME=VALUE, not {text!r}")
    tags = dict(text.split("=", 1) for text in tag or [])
    body = {"tags": tags} | ({"policy": policy} if policy else {})
    session = connect("admin", config, url).call("POST", "/sessions", body)
    if as_json:
        say(json.dumps(session))
        return
    for line in exports(session):
        say(line)


def exports(session: dict[str, Any]) -> list[str]:
    """What to export for clients that read the environment, and where the others are configured."""
    base, key = session["base_url"], session["key"]
    return [
        f"# session {session['session_id']}, model {session['policy']}; the key is shown only now",
        f"export OPENAI_BASE_URL={base}/v1 OPENAI_API_KEY={key}",
        f"export ANTHROPIC_BASE_URL={base} ANTHROPIC_API_KEY={key}",
        f"export GOOGLE_GEMINI_BASE_URL={base} GEMINI_API_KEY={key}",
        "# Codex and others ignore these variables; this prints what they need:",
        f"#   rolltap harness env codex --session {session['session_id']} --key {key}",
    ]


@app.command("list")
@one_line_errors
def list_(as_json: JsonOption = False, url: UrlOption = None, config: ConfigOption = None) -> None:
    """The newest sessions."""
    sessions = connect("admin", config, url).call("GET", "/sessions")["sessions"]
    if as_json:
        say(json.dumps(sessions))
        return
    table = Table("session", "policy", "rollout", "state", "tags")
    for row in sessions:
        state = "closed" if row["closed_at"] else "open"
        tags = " ".join(f"{name}={value}" for name, value in row["tags"].items())
        table.add_row(row["id"], row["policy"], row["rollout_id"] or "", state, tags)
    Screen().print(table)


@app.command()
@one_line_errors
def show(session: str, as_json: JsonOption = False, url: UrlOption = None, config: ConfigOption = None) -> None:
    """Shows a session as a tree of calls: parents, breaks, tokens, outcomes."""
    details = connect("admin", config, url).call("GET", f"/sessions/{session}")
    if as_json:
        say(json.dumps(details))
        return
    for found in details["findings"]:
        say(finding_line(found))
    tree = Tree(f"session {details['id']} (policy {details['policy']})")
    branches = {None: tree}
    for call in details["calls"]:
        parent = branches.get(call["parent_id"], tree)
        branches[call["id"]] = parent.add(_line(call))
    Screen().print(tree)


def finding_line(found: dict[str, Any]) -> str:
    """A finding as one line: its grade, how many calls show it, and its name."""
    return f"{found['grade'].upper()}: {found['count']} {found['text']} ({found['name']})"


def _line(call: dict) -> Text:
    text = Text(
        f"{call['id'][-6:]} {call['kind']} {call['outcome']}: {call['prompt_tokens']} + {call['output_tokens']} tokens"
    )
    if call.get("shared"):
        text.append(f", continues {call['shared']}")
    if call.get("break"):
        text.append(f" break: {call['break']['reason']} at token {call['break']['token_index']}", "yellow")
    if call.get("flaw"):
        text.append(f" {call['flaw']}", "red")
    if call.get("error"):
        text.append(f" {call['error']}", "red")
    return text


@app.command()
@one_line_errors
def close(session: str, url: UrlOption = None, config: ConfigOption = None) -> None:
    """Closes a session: later calls with its key get 409."""
    closed = connect("admin", config, url).call("POST", f"/sessions/{session}/close")
    say(f"session {session} is closed")
    for found in closed["findings"]:
        say(finding_line(found))
