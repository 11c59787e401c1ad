"""`rolltap log` and `rolltap import`: look after a call log, and add foreign traces to it, in the store itself.

On SQLite the commands that write (import, prune, upgrade) need the file to themselves: stop `rolltap serve` first.
"""

from __future__ import annotations

import asyncio
import functools
import json
import re
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, astuple
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from rolltap.calllog.archive import SESSION_MB
from rolltap.calllog.database import Database
from rolltap.calllog.prune import PruneDecision
from rolltap.calllog.sql import open_call_log
from rolltap.cli.common import ConfigOption, JsonOption, StoreOption, chosen_store, one_line_errors
from rolltap.cli.screen import Screen, say
from rolltap.datasets.importing import read_file, write
from rolltap.errors import ConfigError
from rolltap.reconstructor.importers import READERS
from rolltap.tenants import acting_for
from rolltap.wording import counted, utc_text

if TYPE_CHECKING:
    from rolltap.calllog.prune import PruneResult
    from rolltap.ledger.pruning import GroupDecision, KeepRewards, LedgerPruned

    Pruned = tuple[PruneResult, LedgerPruned]

app = typer.Typer(
    help="Maintain the call log: verify, stats, backup, export, import, prune, upgrade.", no_args_is_help=True
)
console = Screen(stderr=True, highlight=False)

SHOWN = 20
_AGES = {"m": 60.0, "h": 3600.0, "d": 86_400.0}


@app.command()
@one_line_errors
def verify(
    pruned: Annotated[
        list[Path] | None, typer.Option("--rewards", help="also check this file of `prune --rewards`; several times")
    ] = None,
    store: StoreOption = "",
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Checks the whole log: hashes, references, deltas, alignment, the chains of rewards.

    Exits with status 1 if anything is wrong. The digest of the rewards changes with every appended or altered reward,
    not by a prune: keep it when your runs are over.
    """
    from rolltap.calllog import verify as checks
    from rolltap.ledger.pruning import CheckedDocuments, check_documents
    from rolltap.ledger.rewards import VerifiedRewards, verify_rewards

    async def run(show: Callable[[int, int], None]) -> tuple[checks.VerifyReport, VerifiedRewards, CheckedDocuments]:
        async with _opened(chosen_store(store, config), writable=False) as database:
            documents = await check_documents(database, pruned or ())
            return await checks.verify(database, show), await verify_rewards(database), documents

    with _progress("rows") as show:
        report, rewards, documents = asyncio.run(run(show))
    report.add([*rewards.problems, *documents.problems])
    if as_json:
        of_rewards = {"rewards": rewards.rewards, "rewards_digest": rewards.digest, "pruned_rewards": rewards.pruned}
        say(json.dumps({**asdict(report), **of_rewards, "documented_groups": documents.groups}))
    else:
        for problem in report.problems[:SHOWN]:
            console.print(problem, style="red")
        more = report.problem_count - min(SHOWN, len(report.problems))
        if more:
            console.print(f"... and {more:,} more")
        verdict = counted(report.problem_count, "problem") if report.problem_count else "all sound"
        counts = {"session": report.sessions, "call": report.calls, "token": report.tokens}
        calls = ", ".join(counted(count, noun) for noun, count in counts.items())
        console.print(f"{calls}, {report.parts:,} parts, {rewards.rewards:,} rewards: {verdict}")
        console.print(f"digest of the rewards: {rewards.digest}", soft_wrap=True)
        if rewards.pruned:
            console.print(f"{counted(rewards.pruned, 'reward')} pruned: their digests are kept")
        if pruned:
            console.print(f"{counted(documents.groups, 'pruned group')} had the rewards that the files have")
    raise typer.Exit(1 if report.problem_count else 0)


@app.command()
@one_line_errors
def stats(store: StoreOption = "", config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Shows counts of the log, and what uses its space."""
    from rolltap.calllog import stats as counting

    async def run() -> counting.Stats:
        async with _opened(chosen_store(store, config), writable=False) as database:
            return await counting.stats(database)

    with console.status("counting"):
        figures = asyncio.run(run())
    if as_json:
        say(json.dumps(asdict(figures)))
        return
    table = Table(show_header=False)
    for name, value in asdict(figures).items():
        text = _shown(name, value)
        if text:
            table.add_row(name.replace("_", " "), text)
    console.print(table)


@app.command("export")
@one_line_errors
def export(
    out: Annotated[Path, typer.Argument(help="file to write; must not exist")],
    session: Annotated[list[str] | None, typer.Option(help="only this session; several times")] = None,
    store: StoreOption = "",
    config: ConfigOption = None,
) -> None:
    """Writes sessions to an archive file, row for row, for another store or for keeping."""
    from rolltap.calllog import archive

    async def run(show: Callable[[int, int], None]) -> archive.TransferCounts:
        async with _opened(chosen_store(store, config), writable=False) as database:
            return await archive.export_sessions(database, out, only=session or (), show=show)

    with _progress("sessions") as show:
        moved = asyncio.run(run(show))
    size = out.stat().st_size
    console.print(
        f"{counted(moved.sessions, 'session')} with {counted(moved.calls, 'call')} in {out} ({size / 1e6:,.1f} MB)"
    )


@app.command()
@one_line_errors
def backup(
    out: Annotated[Path, typer.Argument(help="file to write; must not exist")],
    store: StoreOption = "",
    config: ConfigOption = None,
) -> None:
    """Makes a consistent copy of a whole SQLite store, with groups and rewards. The server may run."""
    from rolltap.calllog.sqlite import back_up

    url = chosen_store(store, config)
    if not url.startswith("sqlite:///"):
        raise ConfigError("this copies SQLite stores; of a Postgres store make a copy with pg_dump")
    with _progress("pages") as show:
        back_up(Path(url.removeprefix("sqlite:///")), out, show)
    console.print(f"{out} ({out.stat().st_size / 1e6:,.1f} MB): to restore it, put it back as rolltap.db")


@app.command("import")
@one_line_errors
def import_(
    files: Annotated[list[Path], typer.Argument(help="files of `rolltap log export`")],
    session_mb: Annotated[float, typer.Option(min=0, help="the largest session that is read, in MB")] = SESSION_MB,
    own: Annotated[
        bool, typer.Option("--own", help="the files are from this store: complete what is here, of every tenant")
    ] = False,
    store: StoreOption = "",
    config: ConfigOption = None,
) -> None:
    """Imports exported sessions into a store. Existing rows stay; conflicting rows are refused.

    Without --own: new sessions of one tenant (ROLLTAP_TENANT) only.
    """
    from rolltap.calllog import archive

    async def run() -> list[archive.TransferCounts]:
        async with _opened(chosen_store(store, config, may_be_new=True), writable=True) as database:
            with console.status("importing") as status:

                def show(path: Path) -> Callable[[int], None]:
                    return lambda done: status.update(f"{path}: {counted(done, 'session')}")

                return [
                    await archive.import_sessions(database, path, session_mb=session_mb, own=own, show=show(path))
                    for path in files
                ]

    for path, moved in zip(files, asyncio.run(run()), strict=True):
        known = f", {moved.sessions - moved.new:,} of them there already" if moved.new < moved.sessions else ""
        console.print(f"{path}: {counted(moved.sessions, 'session')} with {counted(moved.calls, 'call')}{known}")


@app.command()
@one_line_errors
def prune(
    older_than: Annotated[str, typer.Option(help="sessions that ended longer ago: 90m, 12h, 30d")],
    exported: Annotated[list[Path] | None, typer.Option(help="archive that keeps sessions; several times")] = None,
    ledger_older_than: Annotated[
        str, typer.Option(help="also groups, with rollouts and rewards, that were over longer ago: 180d")
    ] = "",
    rewards: Annotated[Path | None, typer.Option(help="new file for the rewards of the groups that go")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="show what would be removed, and remove nothing")] = False,
    store: StoreOption = "",
    config: ConfigOption = None,
) -> None:
    """Removes calls that a trainer has acknowledged or an archive contains. Lists kept sessions with the reason.

    With --ledger-older-than also the groups whose calls are gone; a digest of their rewards stays.

    rolltap log export keep.rtlog && rolltap log prune --older-than 30d --exported keep.rtlog --dry-run
    """
    from rolltap.calllog import prune as retention
    from rolltap.calllog.schema import tenants_on_record
    from rolltap.ledger.keys import note_prune
    from rolltap.ledger.pruning import LedgerPruned, plan_ledger_pruning, prune_ledger, rewards_document
    from rolltap.ledger.views import group_uses

    age, ledger_age = _age(older_than), _age(ledger_older_than, "--ledger-older-than") if ledger_older_than else None
    if rewards is not None and ledger_age is None:
        raise ConfigError("--rewards: nothing of the ledger goes without --ledger-older-than")

    async def run(keep: KeepRewards | None) -> tuple[list[PruneDecision], list[GroupDecision], Pruned | None]:
        exported_ids = await asyncio.to_thread(retention.exported_in, exported or ())
        decisions: list[PruneDecision] = []
        of_groups: list[GroupDecision] = []
        pruned, rows = retention.PruneResult(0, 0, 0), LedgerPruned()
        async with _opened(chosen_store(store, config), writable=not dry_run) as database:
            now = await database.now()
            before = now - age
            for tenant in await database.query(tenants_on_record):
                with acting_for(tenant):
                    decisions += await retention.plan_pruning(
                        database, before=before, exported=exported_ids, uses=group_uses
                    )
                    if not dry_run:
                        note = functools.partial(note_prune, older_than=older_than, exported=exported or ())
                        await database.transact(functools.partial(note, ledger_older_than=ledger_older_than))
                        more = await retention.prune(database, before=before, exported=exported_ids, uses=group_uses)
                        pruned = retention.PruneResult(*map(sum, zip(astuple(pruned), astuple(more), strict=True)))
                    if ledger_age is None:
                        continue
                    going = {each.session_id for each in decisions if each.removes} if dry_run else frozenset()
                    plan = await plan_ledger_pruning(database, before=now - ledger_age, going=going)
                    if not dry_run:
                        rows += await prune_ledger(database, plan, before=now - ledger_age, keep=keep)
                    of_groups += plan
        return decisions, of_groups, None if dry_run else (pruned, rows)

    with rewards_document(None if dry_run else rewards) as keep, console.status("pruning"):
        decisions, of_groups, pruned = asyncio.run(run(keep))
    console.print(_decision_table(decisions))
    if of_groups:
        console.print(_group_table(of_groups))
    elif ledger_age is not None:
        console.print("the ledger has no groups")
    if pruned is None:
        console.print("dry run: nothing was removed")
        return
    calls, rows = pruned
    parts = counted(calls.parts, "part")
    console.print(f"removed {counted(calls.calls, 'call')} of {counted(calls.sessions, 'session')} and {parts}")
    if ledger_age is not None:
        removed = ", ".join(counted(count, noun[:-1]) for noun, count in asdict(rows).items())
        console.print(f"removed of the ledger: {removed}")


@app.command()
@one_line_errors
def upgrade(store: StoreOption = "", config: ConfigOption = None) -> None:
    """Upgrades the tables to this version's schema. `rolltap serve` does the same."""
    from rolltap.calllog.schema import VERSION

    async def run() -> None:
        async with _opened(chosen_store(store, config), writable=True):
            pass

    asyncio.run(run())
    console.print(f"schema {VERSION}")


@asynccontextmanager
async def _opened(url: str, *, writable: bool) -> AsyncIterator[Database]:
    log = open_call_log(url, writable=writable)
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


def _decision_table(decisions: list[PruneDecision]) -> Table:
    table = Table("sessions", "calls", "", "because", "such as")
    by_reason: dict[tuple[bool, str], list[PruneDecision]] = defaultdict(list)
    for decision in decisions:
        by_reason[decision.removes, decision.reason].append(decision)
    for (removes, reason), group in sorted(by_reason.items(), key=lambda item: (not item[0][0], item[0][1])):
        calls = sum(decision.calls for decision in group)
        action = Text("goes", "red") if removes else "stays"
        table.add_row(f"{len(group):,}", f"{calls:,}", action, reason, group[0].session_id)
    return table


def _group_table(decisions: list[GroupDecision]) -> Table:
    table = Table("groups", "rollouts", "", "because", "such as")
    by_reason: dict[tuple[bool, str], list[GroupDecision]] = defaultdict(list)
    for decision in decisions:
        by_reason[not decision.removes, decision.reason].append(decision)
    for (stays, reason), some in sorted(by_reason.items()):
        action = "stays" if stays else Text("goes", "red")
        rollouts = sum(decision.rollouts for decision in some)
        table.add_row(f"{len(some):,}", f"{rollouts:,}", action, reason, some[0].group_id)
    return table


def _shown(name: str, value: object) -> str:
    if isinstance(value, dict):
        return "\n".join(f"{key} {count:,}" for key, count in value.items())
    if isinstance(value, float) and name.endswith("_at"):
        return utc_text(value, "%Y-%m-%dT%H:%M:%S+00:00")
    return f"{value:,}" if isinstance(value, int) else str(value or "")


def _age(text: str, option: str = "--older-than") -> float:
    """Seconds of `90m`, `12h` or `30d`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([mhd])", text.strip())
    if not match:
        raise ConfigError(f"{option}: expected a number and m, h or d, as 30d, not {text!r}")
    return float(match[1]) * _AGES[match[2]]


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
        screen.print(f"not imported: {key} (in {counted(count, 'trace')})")
