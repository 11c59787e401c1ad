"""`--near-duplicates SIMILARITY`: leaves out rows whose text is nearly that of an earlier row, by MinHash.

A row is the set of its runs of `RUN` words (or of token ids, if it has no texts). The share of runs that two rows have
in common (Jaccard) is estimated by `SIZE` minima of hashes, as in Broder, "On the resemblance and containment of
documents" (1997). Two rows are compared if a band of their minima is equal. Takes 512 bytes per row.
"""

from __future__ import annotations

import re
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from rolltap.errors import DatasetError

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
        words += [word.encode() for word in WORD.findall(value.lower())] if isinstance(value, str) else _ids(value)
    places = range(max(len(words) - RUN + 1, 1))
    hashes = {zlib.crc32(b" ".join(words[place : place + RUN])) % PRIME for place in places}
    return np.array(sorted(hashes), np.uint64)


def _ids(array: np.ndarray) -> list[bytes]:
    return [b"%d" % value for value in array.tolist()]


def _leaves(content: Any) -> Iterator[str | np.ndarray]:
    if isinstance(content, (str, np.ndarray)):
        yield content
    elif isinstance(content, Mapping):
        for value in content.values():
            yield from _leaves(value)
    elif isinstance(content, (list, tuple)):
        for value in content:
            yield from _leaves(value)
