"""Training on several ranks: the lead's calls are made on every worker, and an update's batches are dealt out to them.

Only the lead runs the loop and talks to the server. The others wait for its calls, with no limit, since the lead waits
for rollouts. FSDP gathers the weights layer by layer on all ranks together, so each must make as many passes as the
others: ranks that have no batch left take an empty one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rolltap.trainer_client.collate import Batch, empty_batch
from rolltap.trainer_client.learner import Readout
from rolltap.trainer_client.ranks import Ranks
from rolltap.trainer_client.worker import RankWorker


def deal(batches: Sequence[Batch], ranks: int) -> list[list[Batch]]:
    """The batches of each rank: equally many, and those of one pass of about the same length."""
    ordered = sorted(batches, key=lambda batch: batch.tokens, reverse=True)
    ordered += [empty_batch()] * (-len(ordered) % ranks)
    return [ordered[rank::ranks] for rank in range(ranks)]


class Workers:
    """The workers of all ranks, for the lead. A call runs on each of them; the lead's own result is returned."""

    def __init__(self, own: RankWorker, ranks: Ranks) -> None:
        self._own = own
        self._ranks = ranks

    def read(self, network: str, batches: Sequence[Batch]) -> list[Readout]:
        """What a network says of each batch, in the order of `batches`."""
        shares = deal(batches, self._ranks.size)
        return _in_order(batches, shares, self._each("read", [(network, share) for share in shares]))

    def readouts(self, batches: Sequence[Batch]) -> list[Readout]:
        """What the first update, of these batches, computed of each of them."""
        return _in_order(batches, deal(batches, self._ranks.size), self._all("readouts"))

    def begin(self, version: int, updates: Sequence[Sequence[Batch]]) -> None:
        shares = [deal(update, self._ranks.size) for update in updates]
        self._each("begin", [(version, [share[rank] for share in shares]) for rank in range(self._ranks.size)])

    def gradient(self, index: int) -> float:
        return self._all("gradient", index)

    def record_proximal(self) -> None:
        self._all("record_proximal")

    def apply(self, step: int) -> float:
        return self._all("apply", step)

    def update_followers(self, step: int) -> None:
        self._all("update_followers", step)

    def forget(self) -> None:
        self._all("forget")

    def figures(self) -> dict[str, Any]:
        return self._all("figures")

    def weights(self) -> dict[str, Any]:
        return self._all("weights")

    def adapters(self) -> dict[str, Any]:
        return self._all("adapters")

    def state(self) -> dict[str, Any]:
        return self._all("state")

    def dismiss(self) -> None:
        """The other ranks' `follow` ends."""
        self._ranks.scatter([None] * self._ranks.size)

    def _all(self, name: str, *arguments: Any) -> Any:
        return self._each(name, [arguments] * self._ranks.size)

    def _each(self, name: str, arguments: Sequence[tuple[Any, ...]]) -> Any:
        self._ranks.scatter([(name, one) for one in arguments])
        return getattr(self._own, name)(*arguments[0])


def follow(worker: RankWorker, ranks: Ranks) -> None:
    """Makes the lead's calls on this rank's worker until the lead dismisses it."""
    while (call := ranks.scatter(None)) is not None:
        name, arguments = call
        getattr(worker, name)(*arguments)


def _in_order(
    batches: Sequence[Batch], shares: Sequence[Sequence[Batch]], results: Sequence[Sequence[Readout]]
) -> list[Readout]:
    """The ranks' readouts of their shares, in the order of `batches`."""
    by_batch = {
        id(batch): readout
        for share, readouts in zip(shares, results, strict=True)
        for batch, readout in zip(share, readouts, strict=True)
    }
    return [by_batch[id(batch)] for batch in batches]
