"""`rolltap export`: the record as a dataset that other tools load as it is."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from rolltap.calllog.sql import SqlCallLog
from rolltap.cli import export_options as options
from rolltap.cli.common import ConfigOption, config_path, one_line_errors
from rolltap.cli.screen import Screen
from rolltap.datasets.record import Reading, open_record, recorded_groups
from rolltap.errors import DatasetError
from rolltap.proxy.continuation.tokenizer import HubTokenizer
from rolltap.reconstructor.exporters import exporter_named
from rolltap.reconstructor.exporters.base import Exporter, Rendered
from rolltap.reconstructor.exporters.dataset import DEFAULT_SPLIT, DatasetWriter, Decode, Differs, FirstPass, Query
from rolltap.reconstructor.exporters.decontaminate import NGRAM_WORDS, HeldOut
from rolltap.reconstructor.exporters.narrowing import Narrowing
from rolltap.reconstructor.exporters.redact import library_patterns
from rolltap.reconstructor.exporters.select import parse_where
from rolltap.reconstructor.rules import Rules, session_rules
from rolltap.settings import Settings, load_settings
from rolltap.types import Session

SECRETS_VARIABLE = "ROLLTAP_EXPORT_SECRETS"
"""Environment variable with further secrets to keep out, separated by newlines."""

console = Screen(stderr=True, highlight=False)


@dataclass(frozen=True, slots=True)
class ExportJob:
    """One export: where from, where to (None: a dry run), and what."""

    store: str
    out: Path | None
    exporter: Exporter
    query: Query
    rules: Callable[[Session], Rules]
    differs: Differs | None = None
    decode: Decode | None = None


@one_line_errors
def export(
    out: options.Out = None,
    format: options.Format = "trajectories",
    where: options.Where = None,
    since: options.Since = "",
    option: options.FormatOption = None,
    split: options.Split = "train=1",
    seed: options.Seed = 0,
    container: options.InContainer = "",
    include: options.Include = None,
    best: options.Best = 0,
    balance: options.Balance = "",
    limit: options.Limit = 0,
    decontaminate: options.Decontaminate = None,
    ngram: options.Ngram = NGRAM_WORDS,
    duplicates: options.Duplicates = False,
    strategy: options.Strategy = "tree",
    train: options.Train = None,
    tokenizer: options.TokenizerFolder = None,
    detect_secrets: options.DetectSecrets = False,
    dry_run: options.DryRun = False,
    shard_mb: options.ShardMb = 256.0,
    store: options.Store = "",
    config: ConfigOption = None,
) -> None:
    """Writes recorded rollouts as a dataset, with a manifest of what is in it.

    rolltap export out/ --format sft --where "reward>=1 and harness=codex" --split train=0.9,test=0.1
    """
    if out is None and not dry_run:
        raise DatasetError("name a folder to write, or ask for --dry-run")
    loaded = HubTokenizer(tokenizer) if tokenizer is not None else None
    dates = [f"date>='{since}'"] if since else []
    query = Query(
        where=parse_where([*(where or []), *dates]),
        splits=read_splits(split),
        seed=seed,
        container=container or None,  # type: ignore[arg-type]
        include=frozenset(include or ()),
        duplicates=duplicates,
        secrets=os.environ.get(SECRETS_VARIABLE, "").splitlines(),
        detectors=library_patterns() if detect_secrets else (),
        shard_mb=shard_mb,
        strategy=strategy,
        narrowing=Narrowing(best, balance, limit, seed),  # type: ignore[arg-type]
        held_out=HeldOut(decontaminate, ngram) if decontaminate else None,
        tokenizer=loaded.hashes if loaded is not None else None,
    )
    job = ExportJob(
        store=store or settings_store(config),
        out=None if dry_run else out,
        exporter=exporter_named(format, dict(_pairs(option or [], "--option"))),
        query=query,
        rules=policy_rules(load_settings(config_path(config)), train or []),
        differs=differs_by(tokenizer) if tokenizer is not None else None,
        decode=loaded.decode if loaded is not None else None,
    )
    _print(job.out, _run(job))


def _run(job: ExportJob) -> dict[str, Any]:
    with console.status("reading the record") as status:
        return asyncio.run(
            run_export(job, show=lambda sessions, groups: status.update(f"{sessions:,} sessions, {groups:,} groups"))
        )


async def run_export(
    job: ExportJob, *, show: Callable[[int, int], None] = lambda sessions, rows: None
) -> dict[str, Any]:
    """Writes the dataset and returns its manifest. `show` is told how many sessions and groups have been read."""
    call_log = open_record(job.store)
    await call_log.start()
    try:
        query = replace(job.query, chosen=await _chosen(call_log, job)) if job.query.narrowing else job.query
        with DatasetWriter(job.out, job.exporter, query, differs=job.differs, decode=job.decode) as writer:
            sessions = 0
            groups = 0
            async for group in recorded_groups(call_log, Reading(job.query.strategy, job.rules)):
                await asyncio.to_thread(writer.add, group)
                sessions += len(group)
                groups += 1
                show(sessions, groups)
            return await asyncio.to_thread(writer.finish)
    finally:
        await call_log.close()


async def _chosen(call_log: SqlCallLog, job: ExportJob) -> frozenset[str]:
    """The sessions that the job's selection leaves: the record is read once for them, and again for the rows."""
    first = FirstPass(job.exporter, job.query)
    async for group in recorded_groups(call_log, Reading(job.query.strategy, job.rules)):
        await asyncio.to_thread(first.take, group)
    return await asyncio.to_thread(first.chosen)


def settings_store(config: Path | None) -> str:
    """The store that `rolltap serve` would use here."""
    return load_settings(config_path(config)).store_url


def policy_rules(settings: Settings, train: Sequence[str]) -> Callable[[Session], Rules]:
    """The rules that a lease of the session's policy would have, with the rules `train` off as well."""

    def rules(session: Session) -> Rules:
        policy = settings.policies.get(session.policy)
        return session_rules(session, (*(policy.train if policy is not None else ()), *train))

    return rules


def read_splits(text: str) -> dict[str, float]:
    """`train=0.9,test=0.1` as shares by name."""
    splits: dict[str, float] = {}
    for name, share in _pairs(text.split(","), "--split"):
        try:
            splits[name] = float(share)
        except ValueError:
            raise DatasetError(f"--split: {name} wants a share, as in 0.9, not {share!r}") from None
        if not name.isidentifier():
            raise DatasetError(f"--split: {name!r} can't name a file; use letters, digits and _")
    return splits or DEFAULT_SPLIT


def differs_by(folder: Path) -> Differs:
    """Compares with what the chat template in `folder` makes of a conversation, as a trainer would."""
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise DatasetError('--tokenizer needs transformers: pip install "rolltap[train]"') from None
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)

    def differs(rendered: Rendered) -> bool:
        tools = list(rendered.tools) or None
        ids = tokenizer.apply_chat_template(list(rendered.messages), tools=tools, tokenize=True, return_dict=False)
        return list(ids[: len(rendered.token_ids)]) != rendered.token_ids.tolist()

    return differs


def report_table(report: dict[str, Any], title: str = "reconstruction") -> Table:
    """A reconstruction report (`Report.to_dict`) as a table."""

    def share(value: float | None) -> str:
        return "-" if value is None else f"{value:.1%}"

    table = Table(title=title, show_header=False, title_justify="left")
    ratio = report["merge_ratio"]
    table.add_row("sessions", f"{report['trajectories']:,}")
    table.add_row("calls", f"{report.get('calls', 0):,}, of which {report.get('trained_calls', 0):,} carry loss")
    table.add_row("rows", f"{report.get('rows', 0):,}" + (f", {ratio:.2f} calls each" if ratio else ""))
    table.add_row("sampled tokens", f"{report.get('sampled_tokens', 0):,}, {share(report['trained'])} with loss")
    table.add_row("delivered tokens with loss", share(report["kept"]))
    table.add_row("row tokens saved by merging", share(report["saved"]))
    for name, key in (
        ("calls by kind", "calls_by_kind"),
        ("breaks", "breaks_by_reason"),
        ("calls without loss", "masked_calls"),
        ("tokens without loss", "masked_tokens"),
    ):
        found = ", ".join(f"{reason} {count:,}" for reason, count in report[key].items())
        table.add_row(name, found or "none")
    return table


def _pairs(texts: list[str], what: str) -> list[tuple[str, str]]:
    pairs = []
    for text in texts:
        name, sign, value = text.partition("=")
        if not sign or not name.strip():
            raise DatasetError(f"{what}: want NAME=VALUE, not {text!r}")
        pairs.append((name.strip(), value.strip()))
    return pairs


def _print(out: Path | None, manifest: dict[str, Any]) -> None:
    console.print(report_table(manifest["reconstruction"]))
    splits = ", ".join(f"{name} {split['rows']:,}" for name, split in manifest["splits"].items())
    place = f"in {out}" if out is not None else "would be written"
    console.print(f"{manifest['rows']:,} rows of {manifest['format']} {place} ({splits})")
    for name in ("duplicates_left_out", "rows_with_secrets_left_out", "secrets_redacted"):
        if manifest[name]:
            console.print(f"{name.replace('_', ' ')}: {manifest[name]:,}")
    for reason, count in manifest["sessions_left_out"].items():
        console.print(f"sessions left out: {count:,} ({reason})")
    for reason, count in manifest["skipped"].items():
        console.print(f"without a row: {count:,} ({reason})")
    for reason, count in manifest["failed"]["by_reason"].items():
        console.print(Text(f"rows that could not be made: {count:,} ({reason})", style="red"))
    if note := manifest.get("note"):
        checked = manifest.get("rerendered")
        differing = f": {checked['differ']:,} of {checked['rows']:,} rows differ" if checked else ""
        console.print(Text.assemble((note, "yellow"), differing))
