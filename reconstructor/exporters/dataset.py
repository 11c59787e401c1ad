"""The pass that every format shares: select, split, redact, drop duplicates, write shards, write the manifest.

A dataset is never half-written (`destinations`). The same items and query give the same bytes. A row or session that
fails is left out, counted by reason and listed in the manifest, and the export continues; an error of the disk ends it.

A training dataset takes the sessions that a lease would train (`left_out`): no unscorable or masked rollout, and no
group whose rollouts have not all ended. For recorded sessions without a rollout, `Grouping` gives rewards and groups: a
session's score (`rolltap.open(...).score`) is its reward; a tag, or its conversation's opening, is its group.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Literal, get_args

import msgspec

from rolltap.errors import DatasetError, RowError
from rolltap.reconstructor.exporters.base import (
    Container,
    Exporter,
    ExportItem,
    Rendered,
    Row,
    SkippedItem,
    shows_images,
)
from rolltap.reconstructor.exporters.cleaning import Eligible, NearDuplicates, NgramIndex, SessionFilter
from rolltap.reconstructor.exporters.consumers import least_datasets
from rolltap.reconstructor.exporters.destinations import (
    SCHEMA_VERSION,
    Destination,
    DryRun,
    Figures,
    NewFolder,
    SplitRows,
)
from rolltap.reconstructor.exporters.redact import Detector, Redactor, token_arrays
from rolltap.reconstructor.exporters.where import Where
from rolltap.reconstructor.exporters.writers import disk_errors
from rolltap.reconstructor.importers import GROUP_TAG
from rolltap.reconstructor.report import Report, report_of, total
from rolltap.types import EVALUATION, PURPOSE_TAG, RolloutStatus, Scoring

BY_OPENING = "opening"
BY_TAG = "tag."


@dataclass(frozen=True, slots=True)
class Grouping:
    """`score`: name of the score that is the reward. `by`: "opening" or "tag.NAME". Empty: not used."""

    score: str = ""
    by: str = ""

    def __post_init__(self) -> None:
        if self.by and self.by != BY_OPENING and not (self.by.startswith(BY_TAG) and self.tag):
            raise DatasetError(f"--group-by: expected opening or tag.NAME, not {self.by!r}")

    @property
    def tag(self) -> str:
        """The name of the grouping tag; "" if there is none."""
        return self.by.removeprefix(BY_TAG) if self.by.startswith(BY_TAG) else ""

    def of_tags(self, tags: Mapping[str, str]) -> str:
        """The group for a session's tags; "" if the grouping tag is missing. An imported row's group keeps its name."""
        if self.tag not in tags:
            return ""
        return tags[self.tag] if self.tag == GROUP_TAG else f"{self.tag}={tags[self.tag]}"


LeftOut = Literal["running", "failed", "unscorable", "masked", "evaluation"]
LEFT_OUT: tuple[LeftOut, ...] = get_args(LeftOut)

_STATUSES: Mapping[RolloutStatus, LeftOut] = {
    RolloutStatus.PENDING: "running",
    RolloutStatus.RUNNING: "running",
    RolloutStatus.FAILED: "failed",
    RolloutStatus.CANCELLED: "failed",
    RolloutStatus.LOST: "failed",
}
_SCORINGS: Mapping[Scoring, LeftOut] = {Scoring.UNSCORABLE: "unscorable", Scoring.MASKED: "masked"}


def left_out(item: ExportItem) -> LeftOut | None:
    """The reason why a lease would not train the session; None if it would, or if the session has no rollout."""
    if item.session.tags.get(PURPOSE_TAG) == EVALUATION:
        return "evaluation"
    if item.rollout is None:
        return None
    return _STATUSES.get(item.rollout.status) or _SCORINGS.get(item.rollout.scoring)


NAMED = 100
"""The most failures that a manifest lists; the others are only counted."""


class Failures:
    """Counts failures by reason: the error's type and first line."""

    def __init__(self) -> None:
        self._reasons: Counter[str] = Counter()
        self._named: list[dict[str, Any]] = []

    def take(self, error: Exception, session_id: str, row: int | None) -> None:
        """Counts one failure. `row` is the row's index among the format's rows for this session's group.

        None: the session could not be read.
        """
        reason = reason_of(error)
        self._reasons[reason] += 1
        if len(self._named) < NAMED:
            self._named.append({"session_id": session_id, "row": row, "reason": reason})

    @property
    def count(self) -> int:
        return self._reasons.total()

    def to_dict(self) -> dict[str, Any]:
        return {
            "count": self.count,
            "by_reason": dict(sorted(self._reasons.items())),
            "rows": self._named,
        }


def reason_of(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:300]


DEFAULT_SPLIT = {"train": 1.0}

UNREADABLE = "can't be read"
"""The reason in `sessions_left_out` of sessions whose record is damaged."""

Differs = Callable[[Rendered], bool]
"""True if the model's chat template renders a conversation to other tokens than the sampled ones."""


Decode = Callable[[list[int]], str]
"""The text of token ids."""

Lacks = Callable[[Sequence[int]], bool]
"""True if some of the ids are not the tokenizer's."""


@dataclass(frozen=True, slots=True)
class Query:
    """The selection and settings of a dataset. `splits`: shares by name, with a sum of 1. `seed` reshuffles the tasks.

    `include`: reasons of `admission.LEFT_OUT` that don't exclude a session. `duplicates` keeps rows with equal content.
    `shard_mb`: a file of this size (MB) is followed by a new one. `chosen`: the session ids that `session_filter`
    selects, which needs a pass of its own (`FirstPass`). Sessions that overlap with `held_out` are left out.
    `tokenizer`: hashes of the tokenizer and of its chat template, for the manifest. `near`: rows of at least this
    similarity are near-duplicates; 0 keeps them. `grouping` applies to sessions without a rollout. `train`: the rules
    that are off for each policy; "*" is any other one.
    """

    where: Where = field(default_factory=Where)
    splits: Mapping[str, float] = field(default_factory=lambda: DEFAULT_SPLIT)
    seed: int = 0
    container: Container | None = None
    duplicates: bool = False
    include: frozenset[str] = frozenset()
    secrets: Sequence[str] = ()
    detectors: Sequence[Detector] = ()
    shard_mb: float = 256.0
    strategy: str = "tree"
    session_filter: SessionFilter = field(default_factory=SessionFilter)
    chosen: frozenset[str] | None = None
    held_out: NgramIndex | None = None
    tokenizer: Mapping[str, str] | None = None
    near: float = 0.0
    grouping: Grouping = field(default_factory=Grouping)
    train: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not all(share > 0 for share in self.splits.values()) or not abs(sum(self.splits.values()) - 1) <= 1e-6:
            raise DatasetError(f"--split: shares must be above 0 and add up to 1, not {dict(self.splits)}")
        if unknown := self.include - set(LEFT_OUT) | self.include & {"evaluation"}:
            known = ", ".join(reason for reason in LEFT_OUT if reason != "evaluation")
            raise DatasetError(f"--include: no {', '.join(sorted(unknown))}; known: {known}")
        if not 0 < self.shard_mb < math.inf:
            raise DatasetError("--shard-mb: must be a finite number above 0")

    def split_of(self, task_id: str) -> str:
        """The split of a task. A split is a share of the hash space, so it does not depend on other tasks."""
        digest = hashlib.sha256(f"{self.seed}:{task_id}".encode()).digest()
        place = int.from_bytes(digest[:8], "big") / 2**64
        edge = 0.0
        for name, share in self.splits.items():
            edge += share
            if place < edge:
                return name
        return list(self.splits)[-1]


class FirstPass:
    """Selects the sessions for `Query.session_filter` from those that the dataset may hold."""

    def __init__(self, exporter: Exporter, query: Query) -> None:
        self._query = query
        self._for_training = exporter.for_training
        self._seen: list[Eligible] = []

    def take(self, group: Sequence[ExportItem]) -> None:
        for item in group:
            reason = left_out(item) if self._for_training else None
            held_out = self._query.held_out
            if reason is not None and reason not in self._query.include:
                continue
            if self._query.where.keep(item) is not None and not (held_out and held_out.overlap(item)):
                self._seen.append(Eligible.of(item))

    def chosen(self) -> frozenset[str]:
        return self._query.session_filter.choose(self._seen)


NO_CONTENTS: Mapping[bytes, bytes] = MappingProxyType({})


class DatasetWriter:
    """Takes groups of items and writes a finished dataset, or nothing. Use it as a context manager.

    Without `out` it is a dry run: all rows are made and counted, and nothing is written.
    `differs` counts the rows of re-rendering formats whose tokens would not be the sampled ones. `decode` returns the
    text of a row's token ids, which is searched for secrets; a row with ids of which `lacks` is true is left out.
    `known` are contents of rows that an earlier part of the dataset has.
    """

    def __init__(
        self,
        out: Path | None,
        exporter: Exporter,
        query: Query,
        *,
        differs: Differs | None = None,
        decode: Decode | None = None,
        lacks: Lacks | None = None,
        known: Mapping[bytes, bytes] = NO_CONTENTS,
    ) -> None:
        self._decode = decode
        self._lacks = lacks
        self._known = known
        self._near = NearDuplicates(query.near) if query.near else None
        self.contents: dict[bytes, bytes] = {}  # of the rows that were written: digest → claim as JSON
        self._out = out or Path()
        self._destination: Destination = NewFolder(out) if out is not None else DryRun()
        self._exporter = exporter
        self._query = query
        self._differs = differs
        self._container: Container = query.container or exporter.containers[0]
        if self._container not in exporter.containers:
            names = " or ".join(exporter.containers)
            raise DatasetError(f"--container: {exporter.name} is written as {names}, not {self._container}")
        self._redactor = Redactor(query.secrets, query.detectors)
        self._figures = Figures()
        self._failures = Failures()
        self._shards: dict[str, SplitRows] = {}
        self._counts: Counter[str] = Counter()
        self.tasks: dict[str, set[str]] = {name: set() for name in query.splits}  # those that have rows
        self._skipped: Counter[str] = Counter()
        self._left_out: Counter[str] = Counter()
        self._report = Report()

    def __enter__(self) -> DatasetWriter:
        with disk_errors(self._out):
            self._destination.begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for shards in self._shards.values():
            shards.drop()
        self._destination.drop()

    def add(self, group: Sequence[ExportItem]) -> None:
        """Adds the rollouts of one group, or one session without a group."""
        self._counts["sessions"] += len(group)
        items = [kept for item in group if (kept := self._query.where.keep(item)) is not None and self._admits(item)]
        if not items:
            return
        self._counts["sessions_selected"] += len(items)
        self._report = total([self._report, *(report_of(item.trajectory) for item in items)])
        for item in items:
            self._figures.take_item(item)
        split = self._query.split_of(items[0].task_id)
        with disk_errors(self._out):
            for index, row in enumerate(self._rows(items)):
                if isinstance(row, SkippedItem):
                    self._skipped[row.reason] += 1
                    continue
                try:
                    if self._keeps(row):
                        self._write(split, items[0].task_id, row)
                except Exception as error:
                    if isinstance(error, (OSError, MemoryError, DatasetError)) and not isinstance(error, RowError):
                        raise
                    self._failures.take(error, row.values.get("session_id") or items[0].session.id, index)

    def fail(self, session_id: str, error: Exception) -> None:
        """Counts a session that can't be read, and names it in the manifest."""
        self._counts["sessions"] += 1
        self._left_out[UNREADABLE] += 1
        self._failures.take(error, session_id, None)

    def _rows(self, items: Sequence[ExportItem]) -> list[Row | SkippedItem]:
        """The format's rows for a group. Items for which it raises, even alone, are counted and left out.

        So are those whose tokens stand for images: no format of tokens for training has a place for these.
        """
        if self._exporter.faithful and self._exporter.for_training and any(map(shows_images, items)):
            rows = self._rows([item for item in items if not shows_images(item)])
            return [*rows, *(SkippedItem("its tokens stand for images") for item in items if shows_images(item))]
        if not items:
            return []
        try:
            return list(self._exporter.rows(items))
        except (OSError, MemoryError):
            raise
        except Exception as error:  # noqa: BLE001 - named in the manifest
            if len(items) == 1:
                self._failures.take(error, items[0].session.id, 0)
                return []
            usable = [item for item in items if not self._fails_alone(item)]
            if len(usable) < len(items):
                return self._rows(usable) if usable else []
            for item in items:
                self._failures.take(error, item.session.id, 0)
            return []

    def _fails_alone(self, item: ExportItem) -> bool:
        before = self._failures.count
        self._rows([item])
        return self._failures.count > before

    def _admits(self, item: ExportItem) -> bool:
        """True if the dataset may hold this session and the session filter selected it. Counts the others."""
        reason: str | None = left_out(item) if self._exporter.for_training else None
        if reason is None or reason in self._query.include:
            file = self._query.held_out.overlap(item) if self._query.held_out is not None else None
            if file is None and (self._query.chosen is None or item.session.id in self._query.chosen):
                return True
            reason = f"overlaps with {file}" if file is not None else "not selected"
        self._left_out[reason] += 1
        return False

    def finish(self) -> dict[str, Any]:
        """Renames the files, writes the manifest, and moves the folder to `out`. Returns the manifest."""
        with disk_errors(self._out):
            files = [entry for shards in self._shards.values() for entry in shards.finish()]
            manifest = self._manifest(files)
            self._destination.finish(manifest)
        return manifest

    def _keeps(self, row: Row) -> bool:
        """False for duplicates, for rows that contradict an earlier one, and for rows whose tokens contain a secret.

        These are counted.
        """
        if row.texts and (self._redactor.finds(row.texts) or self._spells_secret(row)):
            self._counts["rows_with_secrets_left_out"] += 1
            return False
        if row.content is None or (self._query.duplicates and row.claim is None):
            return True
        digest, claim = hashlib.blake2b(_canonical(row.content), digest_size=16).digest(), _canonical(row.claim)
        before = self.contents.get(digest) or self._known.get(digest)
        if before is not None and before != claim:
            self._skipped["contradicts an earlier row"] += 1
            return False
        if before is not None and not self._query.duplicates:
            self._counts["duplicates_left_out"] += 1
            return False
        if self._near is not None and self._near.knows(row.content):
            self._counts["near_duplicates_left_out"] += 1
            return False
        self.contents[digest] = claim
        return True

    def _spells_secret(self, row: Row) -> bool:
        """True if the row's own ids decode to a secret."""
        decode = self._decode
        return decode is not None and any(self._redactor.finds(decode(ids)) for ids in token_arrays(row.values))

    def _write(self, split: str, task_id: str, row: Row) -> None:
        if self._lacks is not None and any(map(self._lacks, token_arrays(row.values))):
            raise RowError("ids that the tokenizer does not have: no model could be trained on them")
        differs = self._differs(row.rendered) if row.rendered is not None and self._differs is not None else None
        if split not in self._shards:
            size = int(self._query.shard_mb * 1e6)
            self._shards[split] = self._destination.split(split, self._container, self._exporter.schema(), size)
        self._shards[split].write(self._redactor.clean(row.values))
        self._counts["rows_rendered"] += differs is not None
        self._counts["rows_that_differ"] += differs or False
        self.tasks[split].add(task_id)
        self._figures.take_row(split, row)
        self._counts["rows"] += 1
        self._counts[f"rows.{split}"] += 1

    @property
    def size(self) -> int:
        """The approximate size of the rows so far, in bytes."""
        return sum(shards.size for shards in self._shards.values())

    @property
    def asked(self) -> dict[str, Any]:
        """The part of the manifest that describes the query."""
        query = self._query
        return {
            "schema_version": SCHEMA_VERSION,
            "format": self._exporter.name,
            "container": self._container,
            "least_releases": {"datasets": least_datasets(self._exporter, self._container)}
            if self._container != "pt"
            else {},
            "options": asdict(self._exporter),  # type: ignore[call-overload]
            "query": {
                "where": str(query.where),
                "splits": dict(query.splits),
                "seed": query.seed,
                "include": sorted(query.include),
                "duplicates": query.duplicates,
                "near_duplicates": query.near,
                "strategy": query.strategy,
                "narrowing": asdict(query.session_filter),
                "grouping": asdict(query.grouping),
                "train": {policy: list(rules) for policy, rules in query.train.items()},
                "held_out": query.held_out.files if query.held_out is not None else [],
                "held_out_digests": query.held_out.digests if query.held_out is not None else [],
                "ngram": query.held_out.words if query.held_out is not None else None,
                "detectors": sorted({detector.kind for detector in query.detectors}),
            },
            "tokenizer": query.tokenizer,
            "token_faithful": self._exporter.faithful,
        }

    def _manifest(self, files: list[dict[str, Any]]) -> dict[str, Any]:
        manifest: dict[str, Any] = {
            **self.asked,
            "rolltap_version": version("rolltap"),
            "policies": self._figures.policies,
            "lengths": self._figures.lengths,
            "rows": self._counts["rows"],
            "splits": {
                name: {
                    "rows": self._counts[f"rows.{name}"],
                    "tasks": len(self.tasks[name]),
                    **self._figures.tokens(name),
                }
                for name in self._query.splits
            },
            "sessions": self._counts["sessions"],
            "sessions_selected": self._counts["sessions_selected"],
            "sessions_left_out": dict(sorted(self._left_out.items())),
            "duplicates_left_out": self._counts["duplicates_left_out"],
            "near_duplicates_left_out": self._counts["near_duplicates_left_out"],
            "rows_with_secrets_left_out": self._counts["rows_with_secrets_left_out"],
            "secrets_redacted": self._redactor.redacted,
            "secrets_by_kind": dict(sorted(self._redactor.replaced.items())),
            "skipped": dict(sorted(self._skipped.items())),
            "failed": self._failures.to_dict(),
            "files": files,
            "reconstruction": self._report.to_dict(),
        }
        if not self._exporter.faithful:
            manifest["note"] = "a trainer renders these messages anew: its tokens need not be the sampled ones"
            manifest["rerendered"] = (
                {"rows": self._counts["rows_rendered"], "differ": self._counts["rows_that_differ"]}
                if self._differs is not None
                else None
            )
        return manifest


def _canonical(content: Any) -> bytes:
    """Encodes content deterministically: equal content gives equal bytes."""
    return msgspec.json.encode(content, order="sorted", enc_hook=lambda array: (array.dtype.str, array.tobytes()))
