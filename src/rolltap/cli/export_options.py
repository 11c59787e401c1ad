"""What `rolltap export` can be told, an alias an option."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from rolltap.cli.completion import complete_format
from rolltap.reconstructor.exporters import EXPORTERS
from rolltap.reconstructor.exporters.conditions import ITEM_FIELDS, SEGMENT_FIELDS
from rolltap.reconstructor.exporters.consumers import CONSUMERS
from rolltap.reconstructor.exporters.redact import DETECTORS
from rolltap.settings import STORE_HELP

WHERE = f"FIELD OP VALUE and ...; fields {', '.join([*ITEM_FIELDS, *SEGMENT_FIELDS])}"
RERENDER = "count rows that render to other tokens than sampled; look for secrets in the ids"

Out = Annotated[Path | None, Argument(help="folder to write; must not exist, or be empty")]
Format = Annotated[
    str,
    Option(
        "--format", "-f", help=f"one of {', '.join(EXPORTERS)}; default trajectories", autocompletion=complete_format
    ),
]
For = Annotated[str, Option("--for", help=f"the layout of a consumer: {', '.join(CONSUMERS)}")]
Where = Annotated[list[str] | None, Option(help=WHERE)]
Sessions = Annotated[Path | None, Option(help="only the sessions in this file, one id per line (the viewer's format)")]
FormatOption = Annotated[list[str] | None, Option(help="NAME=VALUE of the format, several times")]
Split = Annotated[str, Option(help="shares by task, such as train=0.9,test=0.1")]
Seed = Annotated[int, Option(help="seed that assigns tasks to splits")]
InContainer = Annotated[str, Option(help="jsonl, parquet or pt; default the format's own")]
Include = Annotated[
    list[str] | None, Option(help="include rollouts that a lease would not train: running, failed, ...")
]
Best = Annotated[int, Option(help="at most N rollouts per task, those with the highest reward")]
Balance = Annotated[str, Option(help="the same number of sessions for each harness or task")]
Limit = Annotated[int, Option(help="at most N sessions, drawn by --seed")]
Score = Annotated[str, Option(help="the score that is the reward of sessions without a rollout")]
GroupBy = Annotated[str, Option(help="groups sessions without a rollout: opening, or tag.NAME")]
Since = Annotated[str, Option(help="only sessions opened on or after this date (UTC), such as 2026-03-01")]
Decontaminate = Annotated[list[Path] | None, Option(help="leave out sessions that share --ngram words with a file")]
Ngram = Annotated[int, Option(help="words in a row that count as an overlap")]
Duplicates = Annotated[bool, Option(help="keep rows with equal content")]
Near = Annotated[float, Option("--near-duplicates", help="leave out rows with this similarity to an earlier one: 0.9")]
Push = Annotated[str, Option(help="upload the folder to this dataset repository of the Hugging Face hub")]
Strategy = Annotated[str, Option(help="how calls merge: tree, prefix or per_call")]
Train = Annotated[list[str] | None, Option(help="a mask rule to switch off, such as length_truncated")]
TokenizerFolder = Annotated[Path | None, Option(help=RERENDER)]
DetectorNames = Annotated[
    list[str] | None, Option("--detector", help=f"also redact its findings: {', '.join(DETECTORS)}, or a package's")
]
RedactFile = Annotated[list[Path] | None, Option("--redact", help="TOML file of patterns to redact: KIND = 'PATTERN'")]
StateFile = Annotated[
    Path | None, Option("--state", help="append only sessions that this state file lacks; resumes after a kill")
]
DryRun = Annotated[bool, Option(help="make and count everything, write nothing")]
ShardMb = Annotated[float, Option(help="maximum size of a file, in MB")]
Store = Annotated[str, Option(help=STORE_HELP)]
