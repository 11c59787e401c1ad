"""`rolltap import`: foreign traces into the log, as sessions of text without tokens."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from rolltap.cli.common import ConfigOption, StoreOption, chosen_store, one_line_errors
from rolltap.cli.screen import Screen
from rolltap.counted import counted
from rolltap.datasets.importing import read_file, write
from rolltap.reconstructor.importers import READERS


@one_line_errors
def import_traces(
    files: Annotated[list[Path], typer.Argument(help="JSON or JSON Lines files")],
    format: Annotated[str, typer.Option("--format", "-f", help=f"one of {', '.join(READERS)}")] = "messages",
    store: StoreOption = "",
    config: ConfigOption = None,
) -> None:
    """Imports traces of other tools into the record, as text.

    rolltap import runs/*.jsonl --format messages
    """
    imported_runs = [imported for path in files for imported in read_file(path, format)]
    written = asyncio.run(write(chosen_store(store, config, may_be_new=True), imported_runs))
    known = f", {len(imported_runs) - written:,} were there already" if written < len(imported_runs) else ""
    screen = Screen(stderr=True, highlight=False)
    screen.print(f"{counted(written, 'session')} imported{known}")
    unread = Counter(key for run in imported_runs for key in run.unread)
    for key, count in sorted(unread.items()):
        screen.print(f"not imported, as it is not known: {key} (in {counted(count, 'trace')})")
