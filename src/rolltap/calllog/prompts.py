"""Rebuilds prompts from the deltas in the log.

A call's prompt is the first `shared` tokens of its parent's context (prompt and output), then its own new tokens. Calls
that extend their parent's whole context share one buffer, and their prompts are read-only views of it. So time and
memory of a conversation are those of its last context, plus a copy of the shared prefix for each branch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from rolltap.errors import RecordCorrupt
from rolltap.types import Int32


@dataclass(frozen=True, slots=True, eq=False)
class Delta:
    """The tokens that a stored call adds."""

    id: str
    parent_id: str | None
    shared: int
    new_ids: Int32
    output_ids: Int32


def rebuild_prompts(deltas: Iterable[Delta]) -> dict[str, Int32]:
    """The prompt of every call. Raises `RecordCorrupt` for a missing parent, a cycle, or an impossible `shared`."""
    by_id = {delta.id: delta for delta in deltas}
    children: dict[str | None, list[Delta]] = defaultdict(list)
    for delta in by_id.values():
        if delta.parent_id is not None and delta.parent_id not in by_id:
            raise RecordCorrupt(f"call {delta.id}: its parent {delta.parent_id} is not in the log")
        children[delta.parent_id].append(delta)
    prompts: dict[str, Int32] = {}
    empty = np.empty(0, np.int32)
    heads = [(delta, empty) for delta in children[None]]
    while heads:
        head, context = heads.pop()
        chain = _chain(head, context, children)
        buffer = _fill(chain, context[: head.shared], prompts)
        for delta in chain:
            end = len(prompts[delta.id]) + len(delta.output_ids)
            heads += [(child, buffer[:end]) for child in children[delta.id] if child.id not in prompts]
    if len(prompts) != len(by_id):
        unreached = min(by_id.keys() - prompts.keys())
        raise RecordCorrupt(f"call {unreached}: its ancestors form a cycle")
    return prompts


def _chain(head: Delta, context: Int32, children: Mapping[str | None, list[Delta]]) -> list[Delta]:
    """`head`, then repeatedly the first child that extends the whole context."""
    _check(head, len(context))
    chain = [head]
    length = head.shared + len(head.new_ids) + len(head.output_ids)
    while extension := next((child for child in children[chain[-1].id] if child.shared == length), None):
        chain.append(extension)
        length += len(extension.new_ids) + len(extension.output_ids)
    return chain


def _check(delta: Delta, available: int) -> None:
    if not 0 <= delta.shared <= available:
        raise RecordCorrupt(f"call {delta.id}: shares {delta.shared} tokens, but its parent has {available}")


def _fill(chain: list[Delta], prefix: Int32, prompts: dict[str, Int32]) -> Int32:
    """Fills and returns the chain's buffer; adds the prompts to `prompts` as views of it."""
    size = len(prefix) + sum(len(delta.new_ids) + len(delta.output_ids) for delta in chain)
    buffer = np.empty(size, np.int32)
    buffer[: len(prefix)] = prefix
    view = buffer.view()
    view.flags.writeable = False
    end = len(prefix)
    for delta in chain:
        prompt_end = end + len(delta.new_ids)
        buffer[end:prompt_end] = delta.new_ids
        prompts[delta.id] = view[:prompt_end]
        end = prompt_end + len(delta.output_ids)
        buffer[prompt_end:end] = delta.output_ids
    return view


def ancestry(call_ids: Iterable[str], parents: Mapping[str, str | None]) -> set[str]:
    """`call_ids` and all their ancestors in `parents`."""
    related: set[str] = set()
    for call_id in call_ids:
        current: str | None = call_id
        while current is not None and current not in related and current in parents:
            related.add(current)
            current = parents[current]
    return related


def in_order(parents: Mapping[str, str | None]) -> list[str]:
    """The ids, sorted, but each parent before its children (clocks of several proxies may differ)."""
    ordered: dict[str, None] = {}
    for call_id in sorted(parents):
        path: dict[str, None] = {}
        current: str | None = call_id
        while current is not None and current not in ordered and current in parents and current not in path:
            path[current] = None
            current = parents[current]
        ordered.update(dict.fromkeys(reversed(path)))
    return list(ordered)
