"""`rolltap dead-letters`: the groups that trainers refused too often, listed and revived."""

from __future__ import annotations

import json
from typing import Annotated
from urllib.parse import quote, urlencode

import typer
from rich.table import Table

from rolltap.cli.common import ConfigOption, JsonOption, TrainerUrlOption, connect, one_line_errors
from rolltap.cli.screen import Screen, say

dead_letters = typer.Typer(help="List and revive groups that trainers refused too often.", no_args_is_help=True)


@dead_letters.command("list")
@one_line_errors
def list_dead_letters(
    policy: Annotated[str | None, typer.Option(help="only groups of this policy")] = None,
    limit: Annotated[int, typer.Option(help="maximum number of groups")] = 100,
    as_json: JsonOption = False,
    url: TrainerUrlOption = None,
    config: ConfigOption = None,
) -> None:
    """Lists dead groups, oldest first, with the last reason."""
    query = {"limit": limit} | ({"policy": policy} if policy else {})
    letters = connect("trainer", config, url).call("GET", f"/dead-letters?{urlencode(query)}")["dead_letters"]
    if as_json:
        say(json.dumps(letters))
        return
    table = Table("group", "policy", "task", "failures", "reason")
    for letter in letters:
        group = letter["group"]
        table.add_row(group["id"], group["policy"], group["task_id"], str(group["failures"]), letter["reason"])
    Screen().print(table)


@dead_letters.command("revive")
@one_line_errors
def revive_groups(groups: list[str], url: TrainerUrlOption = None, config: ConfigOption = None) -> None:
    """Offers dead groups to trainers again and resets their failures."""
    client = connect("trainer", config, url)
    for group in groups:
        client.call("POST", f"/dead-letters/{quote(group, safe='')}/revive")
        say(f"group {group} is ready again")
