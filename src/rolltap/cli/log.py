"""`rolltap log`: looks after a call log. It opens the store itself.

On SQLite the commands that write (import, prune, upgrade) want the file to themselves: stop `rolltap serve` first.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from rolltap.calllog.database import Database
from rolltap.calllog.open import open_call_log
from rolltap.calllog.prune import PruneDecision
from rolltap.calllog.sql import SqlCallLog
from rolltap.cli.common import ConfigOption, one_line_errors
from rolltap.cli.export import settings_store
from rolltap.cli.screen import Screen, say
from rolltap.errors import ConfigError

app = typer.Typer(help="Look after the call log: verify, stats, export, import, prune, upgrade.", no_args_is_help=True)
console = Screen(stderr=True, highlight=False)

StoreOption = Annotated[str, typer.Option(help="sqlite:///PATH or postgresql://...; default the settings' store")]
JsonOption = Annotated[bool, typer.Option("--json", help="print JSON")]
SHOWN = 20
_AGES = {"m": 60.0, "h": 3600.0, "d": 86_400.0}


@app.command()
@one_line_errors
def verify(store: StoreOption = "", config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Checks the whole log: hashes, references, deltas, alignment, the chains of rewards.

    Status 1 if anything is wrong. The digest of the rewards changes with every reward that is appended or altered: keep
    it when your runs are over.
    """
    from rolltap.calllog import verify as checks
    from rolltap.ledger.reward_chain import VerifiedRewards, verify_rewards

    async def run(show: Callable[[int, int], None]) -> tuple[checks.Verified, VerifiedRewards]:
        async with _opened(store or settings_store(config), writable=False) as database:
            return await checks.verify(database, show), await verify_rewards(database)

    with _progress("rows") as show:
        found, rewards = asyncio.run(run(show))
    found.add(rewards.problems)
    if as_json:
        say(json.dumps({**asdict(found), "rewards": rewards.rewards, "rewards_digest": rewards.digest}))
    else:
        for problem in found.problems[:SHOWN]:
            console.print(problem, style="red")
        more = found.problem_count - min(SHOWN, len(found.problems))
        if more:
            console.print(f"... and {more:,} more")
        said = f"{found.problem_count:,} problems" if found.problem_count else "all sound"
        calls = f"{found.sessions:,} sessions, {found.calls:,} calls, {found.tokens:,} tokens"
        console.print(f"{calls}, {found.parts:,} parts, {rewards.rewards:,} rewards: {said}")
        console.print(f"digest of the rewards: {rewards.digest}", soft_wrap=True)
    raise typer.Exit(1 if found.problem_count else 0)


@app.command()
@one_line_errors
def stats(store: StoreOption = "", config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Counts what the log holds, and what takes its space."""
    from rolltap.calllog import stats as counting

    async def run() -> counting.Stats:
        async with _opened(store or settings_store(config), writable=False) as database:
            return await counting.stats(database)

    with console.status("counting"):
        found = asyncio.run(run())
    if as_json:
        say(json.dumps(asdict(found)))
        return
    table = Table(show_header=False)
    for name, value in asdict(found).items():
        shown = _shown(name, value)
        if shown:
            table.add_row(name.replace("_", " "), shown)
    console.print(table)


@app.command("export")
@one_line_errors
def export(
    out: Annotated[Path, typer.Argument(help="file to write; must not exist")],
    session: Annotated[list[str] | None, typer.Option(help="only this session; several times")] = None,
    store: StoreOption = "",
    config: ConfigOption = None,
) -> None:
    """Writes sessions into a file, row for row, for another store or for keeping."""
    from rolltap.calllog import transfer

    async def run(show: Callable[[int, int], None]) -> transfer.Moved:
        async with _opened(store or settings_store(config), writable=False) as database:
            return await transfer.export_sessions(database, out, only=session or (), show=show)

    with _progress("sessions") as show:
        moved = asyncio.run(run(show))
    size = out.stat().st_size
    console.print(f"{moved.sessions:,} sessions with {moved.calls:,} calls in {out} ({size / 1e6:,.1f} MB)")


@app.command("import")
@one_line_errors
def import_(
    files: Annotated[list[Path], typer.Argument(help="files of `rolltap log export`")],
    store: StoreOption = "",
    config: ConfigOption = None,
) -> None:
    """Takes exported sessions into a store. What is there already stays; what clashes is refused."""
    from rolltap.calllog import transfer

    async def run() -> list[transfer.Moved]:
        async with _opened(store or settings_store(config), writable=True) as database:
            with console.status("importing") as status:

                def show(path: Path) -> Callable[[int], None]:
                    return lambda done: status.update(f"{path}: {done:,} sessions")

                return [await transfer.import_sessions(database, path, show=show(path)) for path in files]

    for path, moved in zip(files, asyncio.run(run()), strict=True):
        known = f", {moved.sessions - moved.new:,} of them there already" if moved.new < moved.sessions else ""
        console.print(f"{path}: {moved.sessions:,} sessions with {moved.calls:,} calls{known}")


@app.command()
@one_line_errors
def prune(
    older_than: Annotated[str, typer.Option(help="sessions that ended longer ago: 90m, 12h, 30d")],
    exported: Annotated[list[Path] | None, typer.Option(help="archive that keeps sessions; several times")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="say what would go, and remove nothing")] = False,
    store: StoreOption = "",
    config: ConfigOption = None,
) -> None:
    """Removes calls that were acknowledged by a trainer, or that an archive holds. Says what it kept, and why.

    rolltap log export keep.rtlog && rolltap log prune --older-than 30d --exported keep.rtlog --dry-run
    """
    from rolltap.calllog import prune as retention
    from rolltap.ledger.retention import claims, note_prune

    age = _age(older_than)

    async def run() -> tuple[list[PruneDecision], retention.Pruned | None]:
        held = await asyncio.to_thread(retention.exported_in, exported or ())
        async with _opened(store or settings_store(config), writable=not dry_run) as database:
            before = await database.now() - age
            verdicts = await retention.judge(database, before=before, exported=held, claims=claims)
            if dry_run:
                return verdicts, None
            await database.transact(lambda connection: note_prune(connection, older_than, exported or ()))
            return verdicts, await retention.prune(database, before=before, exported=held, claims=claims)

    with console.status("pruning"):
        verdicts, pruned = asyncio.run(run())
    console.print(_verdicts(verdicts))
    if pruned is None:
        console.print("dry run: nothing was removed")
    else:
        console.print(f"removed {pruned.calls:,} calls of {pruned.sessions:,} sessions and {pruned.parts:,} parts")


@app.command()
@one_line_errors
def upgrade(store: StoreOption = "", config: ConfigOption = None) -> None:
    """Brings the tables up to this version's schema (`serve` does so, too)."""
    from rolltap.calllog.schema import VERSION

    async def run() -> None:
        async with _opened(store or settings_store(config), writable=True):
            pass

    asyncio.run(run())
    console.print(f"schema {VERSION}")


@asynccontextmanager
async def _opened(url: str, *, writable: bool) -> AsyncIterator[Database]:
    log = open_call_log(url, writable=writable)
    if not isinstance(log, SqlCallLog):
        raise ConfigError(f"store.url: {url} keeps nothing; name a sqlite:///PATH or postgresql://... store")
    await log.start()
    try:
        yield log.database
    finally:
        await log.close()


@contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None]]:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _verdicts(verdicts: list[PruneDecision]) -> Table:
    table = Table("sessions", "calls", "", "because", "such as")
    by_reason: dict[tuple[bool, str], list[PruneDecision]] = defaultdict(list)
    for verdict in verdicts:
        by_reason[verdict.goes, verdict.reason].append(verdict)
    for (goes, reason), found in sorted(by_reason.items(), key=lambda item: (not item[0][0], item[0][1])):
        calls = sum(verdict.calls for verdict in found)
        does = Text("goes", "red") if goes else "stays"
        table.add_row(f"{len(found):,}", f"{calls:,}", does, reason, found[0].session_id)
    return table


def _shown(name: str, value: object) -> str:
    if isinstance(value, dict):
        return "\n".join(f"{key} {count:,}" for key, count in value.items())
    if isinstance(value, float) and name.endswith("_at"):
        return datetime.fromtimestamp(value, UTC).isoformat(timespec="seconds")
    return f"{value:,}" if isinstance(value, int) else str(value or "")


def _age(text: str) -> float:
    """Seconds of `90m`, `12h` or `30d`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([mhd])", text.strip())
    if not found:
        raise ConfigError(f"--older-than: want a number and m, h or d, as 30d, not {text!r}")
    return float(found[1]) * _AGES[found[2]]
