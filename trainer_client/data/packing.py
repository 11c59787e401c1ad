"""Segments to packs: one-dimensional runs of tokens under a budget, without padding, with or without shared trunks.

A pack is a forest of spans. A span's tokens attend to the span's ancestors and, causally, to themselves, and their
positions go on where the parent's ended. Packed side by side, every row is a span of its own; with prefix sharing,
rows that begin alike have their common trunk once. Nothing here knows of torch. Shapes: `N` tokens of a pack, `L`
tokens of a row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rolltap.types import ROUTED_EXPERTS, Float32, Int32, PromptImage, Segment, images_differ_at

LEAST_SHARED = 16
"""Tokens of the shortest prefix that is shared: each span costs time, too."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedRow:
    """A segment in the loss: row `number` of the step, of rollout `rollout`. The arrays are [L].

    `experts` [L, X] are the experts to replay, X numbers for each token: those that compute the token's state, from
    which the next token is predicted. -1: not known. `files` has those of its images, by digest.
    """

    segment: Segment
    rollout: int
    number: int
    advantages: Float32
    weights: Float32
    extra: Mapping[str, Float32] = field(default_factory=dict)
    experts: NDArray[np.int16] | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)

    @classmethod
    def uniform(
        cls, segment: Segment, rollout: int, number: int = 0, advantage: float = 0.0, weight: float = 0.0, **more: Any
    ) -> PackedRow:
        """A row all of whose tokens have one advantage and one weight."""
        ones = np.ones(len(segment), np.float32)
        return cls(segment, rollout, number, ones * np.float32(advantage), ones * np.float32(weight), **more)

    def scaled(self, factor: float) -> PackedRow:
        """The same with `factor` times the weights."""
        return self if factor == 1 else replace(self, weights=self.weights * np.float32(factor))

    def routed(self) -> PackedRow:
        """The same row with its recorded experts."""
        recorded = self.segment.extras.get(ROUTED_EXPERTS)
        if recorded is None:
            return self
        table = recorded.reshape(len(self), -1)
        return replace(self, experts=np.concatenate([table[1:], np.full_like(table[:1], -1)]))

    def __len__(self) -> int:
        return len(self.segment)

    @property
    def token_ids(self) -> Int32:
        return self.segment.token_ids


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Tokens `[start, end)` of a pack, the first at `position` of its row. `ancestors` are spans, outermost first."""

    start: int
    end: int
    position: int
    ancestors: tuple[int, ...] = ()

    def __len__(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True, eq=False)
class PackedImage:
    """An image in a pack: its file, its patches, and the place of the first of its `tokens`."""

    start: int
    tokens: int
    grid: tuple[int, int, int]
    file: bytes


@dataclass(frozen=True, slots=True, eq=False)
class Pack:
    """The input of one forward pass. `places[i]` [L] are the places in the pack of row i's tokens.

    `experts_NX` are the rows' recorded experts; None if no row has any.
    """

    token_ids_N: Int32
    position_ids_N: Int32
    spans: tuple[TokenSpan, ...]
    rows: tuple[PackedRow, ...]
    places: tuple[Int32, ...]

    @property
    def experts_NX(self) -> NDArray[np.int16] | None:
        width = next((row.experts.shape[1] for row in self.rows if row.experts is not None), None)
        if width is None:
            return None
        experts = np.full((len(self), width), -1, np.int16)
        for row, place in zip(self.rows, self.places, strict=True):
            if row.experts is not None:
                experts[place] = row.experts
        return experts

    @property
    def images(self) -> tuple[PackedImage, ...]:
        """The images in the order of their places, one that rows share once."""
        images = {
            int(place[image.start]): PackedImage(
                int(place[image.start]), image.end - image.start, image.grid, row.files[image.digest]
            )
            for row, place in zip(self.rows, self.places, strict=True)
            for image in row.segment.images
        }
        return tuple(images[start] for start in sorted(images))

    @property
    def image_positions_3N(self) -> Int32:
        """The positions of tokens in text, and of patches in their image's frames, rows and columns."""
        positions = np.empty((3, len(self)), np.int32)
        for row, place in zip(self.rows, self.places, strict=True):
            positions[:, place] = image_positions(len(row), row.segment.images)
        return positions

    def __len__(self) -> int:
        return len(self.token_ids_N)


def image_positions(length: int, images: Sequence[PromptImage]) -> Int32:
    """Qwen2-VL's three positions of each token of a row, [3, L]. A text goes on behind an image's longer side."""
    pieces: list[Int32] = []
    done = position = 0
    for image in images:
        frames, rows, columns = image.grid
        merge = math.isqrt(frames * rows * columns // (image.end - image.start))
        before = image.start - done
        pieces.append(np.tile(np.arange(position, position + before, dtype=np.int32), (3, 1)))
        position += before
        pieces.append(np.indices((frames, rows // merge, columns // merge), np.int32).reshape(3, -1) + position)
        position += max(rows, columns) // merge
        done = image.end
    rest = np.arange(position, position + length - done, dtype=np.int32)
    return np.concatenate([*pieces, np.tile(rest, (3, 1))], axis=1)


@dataclass(frozen=True, slots=True)
class Packer:
    """Packs rows into packs of at most `budget` tokens.

    A row is never split. With `whole`, neither are the rows of a rollout (a sequence-level ratio needs them in one
    pass). A unit over the budget becomes a pack of its own. With `share`, common prefixes are computed once. If the
    rows do not fill one budget for each of `ranks`, the packs are smaller, so that every rank gets some. With `alone`,
    every row is a pack. With `replay`, rows keep their recorded experts and share a prefix only if its experts are
    equal.
    """

    budget: int
    share: bool = False
    whole: bool = False
    ranks: int = 1
    alone: bool = False
    replay: bool = False

    def __call__(self, rows: Sequence[PackedRow]) -> list[Pack]:
        """Packs the rows; `rows` must be sorted by rollout."""
        if self.replay:
            rows = [row.routed() for row in rows]
        if self.alone:
            return [_side_by_side([row]) for row in rows]
        units = [[row] for row in rows]
        if self.whole:
            units = [list(own) for _, own in groupby(rows, key=lambda row: row.rollout)]
        budget = min(self.budget, math.ceil(sum(map(_tokens, units)) / self.ranks))
        if self.share:
            return [_forest(rows) for rows in _along_prefixes(units, budget)]
        return [_side_by_side(rows) for rows in _first_fit(units, budget)]


def shared_length(left: PackedRow, right: PackedRow) -> int:
    """The number of leading tokens with equal ids, images and experts; 0 if they are fewer than `LEAST_SHARED`."""
    length = min(len(left), len(right))
    length = min(length, images_differ_at(left.segment.images, right.segment.images))
    differs = left.token_ids[:length] != right.token_ids[:length]
    if left.experts is not None and right.experts is not None:
        differs |= (left.experts[:length] != right.experts[:length]).any(axis=1)
    elif (routed := left.experts if right.experts is None else right.experts) is not None:
        differs |= (routed[:length] >= 0).any(axis=1)
    differing = np.flatnonzero(differs)
    shared = int(differing[0]) if len(differing) else length
    return shared if shared >= LEAST_SHARED else 0


def _first_fit(units: list[list[PackedRow]], budget: int) -> list[list[PackedRow]]:
    """Bin packing by first fit, the longest unit first."""
    bins: list[list[PackedRow]] = []
    free: list[int] = []
    for unit in sorted(units, key=_tokens, reverse=True):
        size = _tokens(unit)
        fitting = next((index for index, room in enumerate(free) if room >= size), None)
        if fitting is None:
            bins.append(list(unit))
            free.append(budget - size)
        else:
            bins[fitting].extend(unit)
            free[fitting] -= size
    return bins


def _along_prefixes(units: list[list[PackedRow]], budget: int) -> list[list[PackedRow]]:
    """Fills packs in the order of the rows' tokens, so that rows with a common prefix become neighbours."""
    ordered = sorted((sorted(unit, key=_key) for unit in units), key=lambda unit: _key(unit[0]))
    bins: list[list[PackedRow]] = []
    used = 0
    for unit in ordered:
        added = _added(bins[-1][-1] if bins else None, unit)
        if not bins or used + added > budget:
            bins.append([])
            used, added = 0, _added(None, unit)
        bins[-1].extend(unit)
        used += added
    return bins


def _tokens(unit: Sequence[PackedRow]) -> int:
    return sum(len(row) for row in unit)


def _key(row: PackedRow) -> bytes:
    """Sorts rows by their tokens, and those that stand for images by these."""
    ids = row.token_ids.astype(">u4")
    for image in row.segment.images:
        ids[image.start] = int(image.digest[:8], 16)
    return ids.tobytes()


def _added(before: PackedRow | None, unit: Sequence[PackedRow]) -> int:
    """An upper bound of the tokens that `unit` adds to a pack that ends with `before`."""
    total = 0
    for row in unit:
        total += len(row) - (0 if before is None else shared_length(before, row))
        before = row
    return total


def _side_by_side(rows: Sequence[PackedRow]) -> Pack:
    spans, start = [], 0
    for row in rows:
        spans.append(TokenSpan(start, start + len(row), 0))
        start += len(row)
    return Pack(
        np.concatenate([row.token_ids for row in rows]),
        np.concatenate([np.arange(len(row), dtype=np.int32) for row in rows]),
        tuple(spans),
        tuple(rows),
        tuple(np.arange(span.start, span.end, dtype=np.int32) for span in spans),
    )


@dataclass(slots=True, eq=False)
class _Node:
    """Tokens `[start, end)` of `row`, which every row below this node shares."""

    row: PackedRow
    start: int
    end: int
    parent: _Node | None = None
    index: int = field(default=-1)

    def path(self) -> list[_Node]:
        """The nodes from the root to this one."""
        nodes: list[_Node] = []
        node: _Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


def _forest(rows: Sequence[PackedRow]) -> Pack:
    """The rows' radix forest. Sorted by their tokens, a row shares most with the one before it."""
    rows = sorted(rows, key=_key)
    leaves: list[_Node] = []
    for row in rows:
        trunk = leaves[-1] if leaves else None
        shared = 0 if trunk is None else shared_length(trunk.row, row)
        while trunk is not None and trunk.start >= shared:
            trunk = trunk.parent
        if trunk is not None and shared < trunk.end:
            trunk.parent = _Node(trunk.row, trunk.start, shared, trunk.parent)
            trunk.start = shared
            trunk = trunk.parent
        if trunk is not None and shared == len(row):
            leaves.append(trunk)
        else:
            leaves.append(_Node(row, shared, len(row), trunk))
    return _flattened(rows, leaves)


def _flattened(rows: Sequence[PackedRow], leaves: Sequence[_Node]) -> Pack:
    nodes: list[_Node] = []
    spans: list[TokenSpan] = []
    places: list[Int32] = []
    size = 0
    for leaf in leaves:
        path = leaf.path()
        for depth, node in enumerate(path):
            if node.index < 0:
                node.index = len(nodes)
                nodes.append(node)
                ancestors = tuple(above.index for above in path[:depth])
                spans.append(TokenSpan(size, size + node.end - node.start, node.start, ancestors))
                size = spans[-1].end
        own = [spans[node.index] for node in path]
        places.append(np.concatenate([np.arange(span.start, span.end, dtype=np.int32) for span in own]))
    return Pack(
        np.concatenate([node.row.token_ids[node.start : node.end] for node in nodes]),
        np.concatenate([np.arange(node.start, node.end, dtype=np.int32) for node in nodes]),
        tuple(spans),
        tuple(rows),
        tuple(places),
    )
