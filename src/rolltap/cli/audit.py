"""`rolltap audit`: which key did what on a running server."""

from __future__ import annotations

import json
import time
from typing import Annotated
from urllib.parse import urlencode

import typer
from rich.table import Table

from rolltap.cli.common import ConfigOption, JsonOption, UrlOption, connect, one_line_errors
from rolltap.cli.screen import Screen, say


@one_line_errors
def audit(
    key: Annotated[str, typer.Option(help="only entries of the key with this id")] = "",
    limit: Annotated[int, typer.Option(min=1, max=1000, help="maximum number of entries")] = 100,
    as_json: JsonOption = False,
    url: UrlOption = None,
    config: ConfigOption = None,
) -> None:
    """Shows the newest entries of the audit log, including refusals: time, key and request."""
    query = urlencode({"limit": limit} | ({"key_id": key} if key else {}))
    entries = connect("admin", config, url).call("GET", f"/audit?{query}")["entries"]
    if as_json:
        say(json.dumps(entries))
        return
    table = Table("at", "key", "role", "action", "detail")
    for entry in entries:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry["at"]))
        table.add_row(at, entry["key_id"], entry["role"], entry["action"], json.dumps(entry["detail"]))
    Screen().print(table)
