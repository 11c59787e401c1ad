"""`rolltap dead-letters`: the groups that trainers refused too often, listed and revived."""

from __future__ import annotations

import json
from typing import Annotated
from urllib.parse import quote, urlencode

import typer
from rich.console import Console
from rich.table import Table

from rolltap.cli.client import PlaneClient
from rolltap.cli.common import one_line_errors

app = typer.Typer(help="List and revive groups that trainers refused too often.", no_args_is_help=True)


@app.command("list")
@one_line_errors
def list_(
    policy: Annotated[str | None, typer.Option(help="of this policy only")] = None,
    limit: Annotated[int, typer.Option(help="at most so many")] = 100,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """The dead groups, oldest first, with the last reason."""
    query = {"limit": limit} | ({"policy": policy} if policy else {})
    found = PlaneClient("trainer").call("GET", f"/dead-letters?{urlencode(query)}")["dead_letters"]
    if as_json:
        typer.echo(json.dumps(found))
        return
    table = Table("group", "policy", "task", "failures", "reason")
    for letter in found:
        group = letter["group"]
        table.add_row(group["id"], group["policy"], group["task_id"], str(group["failures"]), letter["reason"])
    Console().print(table)


@app.command()
@one_line_errors
def revive(groups: list[str]) -> None:
    """The dead groups are ready for trainers again, their failures forgotten."""
    client = PlaneClient("trainer")
    for group in groups:
        client.call("POST", f"/dead-letters/{quote(group, safe='')}/revive")
        typer.echo(f"group {group} is ready again")
