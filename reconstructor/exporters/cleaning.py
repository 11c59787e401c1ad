"""What a dataset leaves out on request: sessions by `--best`, `--balance` and `--limit`, near duplicates, benchmarks.

`SessionFilter` selects among the sessions that `--where` keeps: a first pass over the record collects a short entry per
session (`Eligible`), a second pass writes the selected ones.

`NearDuplicates` leaves out rows whose text is nearly that of an earlier row, by MinHash. A row is the set of its runs
of `RUN` words (or of token ids, if it has no texts). The share of runs that two rows have in common (Jaccard) is
estimated by `SIZE` minima of hashes, as in Broder, "On the resemblance and containment of documents" (1997). Two rows
are compared if a band of their minima is equal. Takes 512 bytes per row.

`NgramIndex` leaves out sessions that share a run of words with given files (such as a benchmark's questions). A file is
text, JSON or JSON Lines; in JSON every string counts, except those of the `LABELS`. Of a session's messages the
content, the reasoning and the arguments of tool calls count. Words are compared in lower case, without punctuation. A
text of fewer words than `words` is compared as a whole, with whole texts.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
import numpy as np

from rolltap.errors import DatasetError
from rolltap.reconstructor.exporters.base import ExportItem, Message

BalanceBy = Literal["", "harness", "task"]


@dataclass(frozen=True, slots=True)
class Eligible:
    """A session that may be selected."""

    session_id: str
    task_id: str
    harness: str
    reward: float | None

    @classmethod
    def of(cls, item: ExportItem) -> Eligible:
        return cls(item.session.id, item.task_id, item.harness, item.reward)


@dataclass(frozen=True, slots=True)
class SessionFilter:
    """In this order: `best` rollouts of each task by reward, as many of each `balance`, `limit` in all. 0: no bound.

    Random choices follow a hash of `seed` and the session's id, so a higher limit keeps the sessions of a lower one.
    """

    best: int = 0
    balance: BalanceBy = ""
    limit: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.balance not in get_args(BalanceBy):
            raise DatasetError(f"--balance: expected harness or task, not {self.balance!r}")
        if self.best < 0 or self.limit < 0:
            raise DatasetError("--best and --limit: expected a number of sessions, 1 or more")

    def __bool__(self) -> bool:
        """True if there is any bound."""
        return bool(self.best or self.balance or self.limit)

    def choose(self, sessions: Iterable[Eligible]) -> frozenset[str]:
        """The ids of the sessions to write."""
        kept = list(sessions)
        if self.best:
            kept = list(chain.from_iterable(map(self._best, _by(kept, "task"))))
        kept.sort(key=lambda session: hashlib.sha256(f"{self.seed}:{session.session_id}".encode()).digest())
        if self.balance:
            classes = _by(kept, self.balance)
            even = min(map(len, classes), default=0)
            turns = zip_longest(*(members[:even] for members in classes))
            kept = [session for turn in turns for session in turn]
        return frozenset(session.session_id for session in (kept[: self.limit] if self.limit else kept))

    def _best(self, sessions: Sequence[Eligible]) -> list[Eligible]:
        """The sessions of one task with the highest rewards; of equal ones, the older. None without a reward."""
        scored = [(session.reward, session) for session in sessions if session.reward is not None]
        scored.sort(key=lambda pair: (-pair[0], pair[1].session_id))
        return [session for _, session in scored[: self.best]]


def _by(sessions: Iterable[Eligible], name: Literal["harness", "task"]) -> list[list[Eligible]]:
    """The sessions grouped by task or harness, in the order of first appearance."""
    classes: defaultdict[str, list[Eligible]] = defaultdict(list)
    for session in sessions:
        classes[session.task_id if name == "task" else session.harness].append(session)
    return list(classes.values())


RUN = 5
SIZE = 128
BAND = 4
"""Minima per band. At a similarity of 0.7, one pair of rows in five thousand shares no band."""

PRIME = (1 << 31) - 1
WORD = re.compile(r"\w+")
CHUNK = 4096


class NearDuplicates:
    """Stores the signatures of rows. Estimates have an error of about 0.04 (one standard deviation at 0.8)."""

    def __init__(self, similarity: float) -> None:
        if not 0.5 <= similarity <= 1:
            raise DatasetError(
                f"--near-duplicates: expected a share of equal runs of words from 0.5 to 1, not {similarity}"
            )
        self._similarity = similarity
        random = np.random.default_rng(0)
        self._factors = random.integers(1, PRIME, SIZE, np.uint64)
        self._offsets = random.integers(0, PRIME, SIZE, np.uint64)
        self._signatures: list[np.ndarray] = []
        self._bands: defaultdict[tuple[int, bytes], list[int]] = defaultdict(list)

    def knows(self, content: Any) -> bool:
        """True if an earlier row is nearly the same; otherwise the row is stored."""
        signature = self._signature(_runs(content))
        keys = [(at, signature[at : at + BAND].tobytes()) for at in range(0, SIZE, BAND)]
        for index in {index for key in keys for index in self._bands.get(key, ())}:
            if np.mean(self._signatures[index] == signature) >= self._similarity:
                return True
        for key in keys:
            self._bands[key].append(len(self._signatures))
        self._signatures.append(signature)
        return False

    def _signature(self, runs: np.ndarray) -> np.ndarray:
        minima = np.full(SIZE, PRIME, np.uint64)
        for start in range(0, len(runs), CHUNK):
            values = runs[start : start + CHUNK, None] * self._factors + self._offsets
            minima = np.minimum(minima, (values % PRIME).min(axis=0))
        return minima.astype(np.uint32)


def _runs(content: Any) -> np.ndarray:
    """The hashes of the distinct runs of words or ids in a row's content, below `PRIME`."""
    words: list[bytes] = []
    for value in _leaves(content):
        if isinstance(value, str):
            words += [word.encode() for word in WORD.findall(value.lower())]
        else:
            words += [b"%d" % number for number in value.tolist()]
    places = range(max(len(words) - RUN + 1, 1))
    hashes = {zlib.crc32(b" ".join(words[place : place + RUN])) % PRIME for place in places}
    return np.array(sorted(hashes), np.uint64)


def _leaves(content: Any) -> Iterator[str | np.ndarray]:
    if isinstance(content, (str, np.ndarray)):
        yield content
    elif isinstance(content, Mapping):
        for value in content.values():
            yield from _leaves(value)
    elif isinstance(content, (list, tuple)):
        for value in content:
            yield from _leaves(value)


NGRAM_WORDS = 13
LABELS = ("role", "type", "id", "name", "tool_call_id")
"""The keys of JSON whose strings are no text of a question, such as a chat message's `role`."""


class NgramIndex:
    """The n-grams of files. Only their hashes are kept, of 8 bytes each. `digests` are the files' SHA-256."""

    def __init__(self, files: Sequence[Path], words: int = NGRAM_WORDS) -> None:
        if words < 1:
            raise DatasetError("--ngram: expected a number of words, 1 or more")
        self.files = [file.name for file in files]
        self.words = words
        self.digests: list[str] = []
        self._grams: dict[int, int] = {}
        for index, file in enumerate(files):
            try:
                content = file.read_text(encoding="utf-8-sig")
            except (OSError, UnicodeDecodeError) as error:
                raise DatasetError(f"--decontaminate: can't read {file}: {error}") from error
            self.digests.append(hashlib.sha256(content.encode()).hexdigest())
            for text in _texts_of(file, content):
                for gram in self._ngrams(text):
                    self._grams.setdefault(gram, index)

    def overlap(self, item: ExportItem) -> str | None:
        """The name of a file that shares an n-gram with a session's messages, or None."""
        seen: set[int] = set()
        for call in item.texts.values():
            for message in call.conversation:
                if id(message) in seen:
                    continue
                seen.add(id(message))
                for text in _said(message):
                    file = next((self._grams[gram] for gram in self._ngrams(text) if gram in self._grams), None)
                    if file is not None:
                        return self.files[file]
        return None

    def _ngrams(self, text: str) -> Iterator[int]:
        words = WORD.findall(text.lower())
        for start in range(max(len(words) - self.words + 1, min(len(words), 1))):
            yield hash(tuple(words[start : start + self.words]))


def _texts_of(file: Path, content: str) -> Iterable[str]:
    if file.suffix not in (".jsonl", ".json"):
        return [content]
    lines = content.split("\n") if file.suffix == ".jsonl" else [content]
    try:
        return [text for line in lines if line.strip() for text in _strings(msgspec.json.decode(line), LABELS)]
    except msgspec.DecodeError as error:
        raise DatasetError(f"--decontaminate: {file} is not JSON: {error}") from error


def _said(message: Message) -> Iterator[str]:
    """The texts that a message says."""
    content = message.get("content") or ""
    yield from [content] if isinstance(content, str) else (part["text"] for part in content if part["type"] == "text")
    yield message.get("reasoning_content") or ""
    for call in message.get("tool_calls") or ():
        yield from _strings(call["function"]["arguments"])


def _strings(value: Any, skipped: Sequence[str] = ()) -> Iterator[str]:
    """Every string in a JSON value, except keys and the `skipped` keys' strings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            if key not in skipped or not isinstance(item, str):
                yield from _strings(item, skipped)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item, skipped)
