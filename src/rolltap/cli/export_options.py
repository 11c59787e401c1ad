"""What `rolltap export` can be told, an alias an option."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from rolltap.reconstructor.exporters import EXPORTERS
from rolltap.reconstructor.exporters.conditions import ITEM_FIELDS, SEGMENT_FIELDS

WHERE = f"FIELD OP VALUE and ...; fields {', '.join([*ITEM_FIELDS, *SEGMENT_FIELDS])}"
RERENDER = "count rows that render to other tokens than sampled; look for secrets in the ids"

Out = Annotated[Path | None, Argument(help="folder to write; must not exist, or be empty")]
Format = Annotated[str, Option("--format", "-f", help=f"one of {', '.join(EXPORTERS)}")]
Where = Annotated[list[str] | None, Option(help=WHERE)]
FormatOption = Annotated[list[str] | None, Option(help="NAME=VALUE of the format, several times")]
Split = Annotated[str, Option(help="shares by task, as train=0.9,test=0.1")]
Seed = Annotated[int, Option(help="draws other tasks into the splits")]
InContainer = Annotated[str, Option(help="jsonl or parquet; default the format's own")]
Include = Annotated[
    list[str] | None, Option(help="rollouts to keep that a lease would not train: running, failed, ...")
]
Best = Annotated[int, Option(help="at most N rollouts a task, those of the highest reward")]
Balance = Annotated[str, Option(help="as many sessions of each: harness or task")]
Limit = Annotated[int, Option(help="at most N sessions, drawn by --seed")]
Since = Annotated[str, Option(help="only sessions opened at this date or later, UTC, as 2026-03-01")]
Decontaminate = Annotated[list[Path] | None, Option(help="leave out sessions that share --ngram words with a file")]
Ngram = Annotated[int, Option(help="words in a row that count as an overlap")]
Duplicates = Annotated[bool, Option(help="keep rows with equal content")]
Strategy = Annotated[str, Option(help="how calls merge: tree, prefix or per_call")]
Train = Annotated[list[str] | None, Option(help="a rule to switch off, as length_truncated")]
TokenizerFolder = Annotated[Path | None, Option(help=RERENDER)]
DetectSecrets = Annotated[bool, Option(help="look for secrets with detect-secrets' patterns, too")]
DryRun = Annotated[bool, Option(help="make and count everything, write nothing")]
ShardMb = Annotated[float, Option(help="size at which the next file begins")]
Store = Annotated[str, Option(help="sqlite:///PATH or postgresql://...; default the settings' store")]
