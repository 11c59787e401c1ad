"""What a forest says that it takes in memory, beside what Python's allocator says."""

from __future__ import annotations

import os
import tracemalloc

import numpy as np
import pytest

from rolltap.ids import new_id
from rolltap.protocols.cache_space import CacheSpace
from rolltap.protocols.conversation import Message, Text
from rolltap.proxy.continuation.call_node import CallNode, Lineage
from rolltap.proxy.continuation.canonical import DIGEST_BYTES, DigestCache
from rolltap.proxy.continuation.forest import Forest
from rolltap.types import Int32, Outcome

FRAME = (b"t" * DIGEST_BYTES, b"s" * DIGEST_BYTES)


def ids(count: int) -> Int32:
    return np.arange(count, dtype=np.int32)


def chain_of(forest: Forest, calls: int, *, added: int, sampled: int) -> None:
    """Each call continues the one before it, with `added` ids of its own in two messages, and samples `sampled`."""
    parent, base, length = None, 0, 0
    for number in range(calls):
        lineage = Lineage(base, os.urandom(2 * DIGEST_BYTES), *FRAME)
        node = CallNode(new_id(), parent, lineage, ids(length + added), shared=length)
        node.items = tuple(os.urandom(DIGEST_BYTES) for _ in range(2 * number))
        forest.add(node)
        reply = Message("assistant", (Text("r" * 4 * sampled + str(number)),))
        forest.complete(node, ids(sampled), reply, Outcome.COMPLETED)
        parent, base, length = node, base + 3, length + added + sampled


@pytest.mark.parametrize(("calls", "added", "sampled"), [(400, 20, 10), (100, 400, 100), (20, 20_000, 50)])
def test_the_size_is_about_what_python_holds(calls: int, added: int, sampled: int) -> None:
    tracemalloc.start()
    try:
        forest = Forest(DigestCache(space=CacheSpace(1)))  # which keeps nothing
        before, _ = tracemalloc.get_traced_memory()
        chain_of(forest, calls, added=added, sampled=sampled)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.9 < forest.size / (after - before) < 2


def test_the_size_is_the_sum_of_the_calls_own() -> None:
    forest = Forest(DigestCache())
    chain_of(forest, 30, added=50, sampled=10)
    nodes = list(forest.nodes.values())
    assert forest.size == sum(node.size for node in nodes)
    assert nodes[-2].stored_ids < nodes[-1].stored_ids  # one holds it whole
