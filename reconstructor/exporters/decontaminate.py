"""`--decontaminate`: leaves out sessions that share a run of words with given files (such as a benchmark's questions).

A file is text, JSON or JSON Lines; in JSON every string counts, except those of the `LABELS`. Of a session's messages
the content, the reasoning and the arguments of tool calls count. Words are compared in lower case, without punctuation.
A text of fewer words than `words` is compared as a whole, with whole texts.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rolltap.errors import DatasetError
from rolltap.reconstructor.exporters.base import ExportItem, Message

NGRAM_WORDS = 13
LABELS = ("role", "type", "id", "name", "tool_call_id")
"""The keys of JSON whose strings are no text of a question, such as a chat message's `role`."""

WORD = re.compile(r"\w+")


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
            content = _content_of(file)
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


def _content_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(f"--decontaminate: can't read {file}: {error}") from error


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
