"""A rank's part of a step (`RankWorker`), and the lead's calls to the workers of all ranks (`Workers`).

A worker computes the gradients of its share of the batches and makes the optimiser's steps. Each rank holds a shard of
the weights, so every call runs on all ranks at once. A method returns the same on every rank, except that only the lead
gets whole weights, states and readouts.

Only the lead runs the loop and talks to the server. The other ranks wait for its calls without a limit, since the lead
waits for rollouts. FSDP gathers the weights layer by layer on all ranks together, so all must make the same number of
passes: a rank with fewer batches takes empty ones.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rolltap.trainer_client.data.collate import Batch, empty_batch
from rolltap.trainer_client.model.checkpoint import SavedCheckpoint, load_optimiser
from rolltap.trainer_client.model.learner import Learner, Readout
from rolltap.trainer_client.model.loss import Terms
from rolltap.trainer_client.model.network import Predictions
from rolltap.trainer_client.model.ranks import Ranks
from rolltap.trainer_client.model.routing import RouterLoss
from rolltap.trainer_client.recipes import fingerprint, make_recipe, restore
from rolltap.trainer_client.run.metrics import CLIPPED, Clock, StepMetrics
from rolltap.trainer_client.run.planning import policy_loss
from rolltap.trainer_client.settings import TrainerSettings


class RankWorker:
    """This rank's learner and its current step. `saved` is the lead's checkpoint; None for a new run."""

    def __init__(self, settings: TrainerSettings, ranks: Ranks, saved: SavedCheckpoint | None) -> None:
        saved = ranks.from_lead(saved)
        self.recipe = make_recipe(settings.recipe, settings.options)
        self.learner = Learner(saved.folder if saved else settings.model, settings, ranks, self.recipe)
        # Taken now, of the code that runs: the recipe's file may be edited before a checkpoint.
        self._fingerprint = fingerprint(settings.recipe, self.recipe)
        if saved:
            state = load_optimiser(saved)
            restore(settings.recipe, self.recipe, state.pop("recipe", None), changed=settings.recipe_changed)
            self.learner.restore(state, changed=settings.recipe_changed)
        self.clock = Clock(self.learner.device)
        self._ranks = ranks
        self._threshold = settings.report.mismatch
        self._policy_loss = policy_loss(settings.loss)
        self._router_loss = RouterLoss(settings.router.balance, settings.router.z)
        self._annotates = settings.report.annotate
        self._readouts: list[Readout] = []
        self._updates: list[Sequence[Batch]] = []
        self._gauge = self._new_metrics(0)

    def read(self, network: str, batches: Sequence[Batch]) -> list[list[Readout]]:
        """The network's readout of each batch's trained tokens: for the lead, one list for each rank."""
        with self.clock.part("read"):
            own = [self.learner.read(network, batch.to(self.learner.device)) for batch in batches]
        return self._ranks.gather(own)

    def begin(self, version: int, updates: Sequence[Sequence[Batch]]) -> None:
        """Begins a step from the weights of `version`, with this rank's batches of each update."""
        self._updates, self._readouts = list(updates), []
        self._gauge = self._new_metrics(version)

    def gradient(self, index: int) -> float:
        """Accumulates the gradient of all batches of an update; returns its norm before clipping."""
        for batch in self._updates[index]:
            batch = batch.to(self.learner.device)
            with self.clock.part("forward"):
                batch = self.learner.with_reference(batch)
                predicted = self.learner.predict(batch)
                terms = self._terms(predicted, batch)
            self._gauge.add(predicted, batch, terms, first=index == 0)
            if index == 0 and self._annotates:
                values = (predicted.logprobs_M, predicted.entropy_M, terms.clipped_M)
                logprobs, entropy, clipped = (value.detach().float().cpu().numpy() for value in values)
                self._readouts.append(Readout(logprobs, entropy, {CLIPPED: clipped}))
            with self.clock.part("backward"):
                self.learner.backward(terms.loss)
        with self.clock.part("backward"):
            return self.learner.clip()

    def readouts(self) -> list[list[Readout]]:
        """The first update's readout of each batch: for the lead, one list for each rank. Needs `report.annotate`."""
        return self._ranks.gather(self._readouts)

    def _terms(self, predicted: Predictions, batch: Batch) -> Terms:
        """The loss. For an empty batch it is 0, and all weights are in its graph, as FSDP needs it."""
        if batch.trained_tokens:
            terms = self.recipe.loss(predicted, batch, self._policy_loss)
            if not predicted.choices:
                return terms
            routers = self._router_loss(predicted.choices, batch.places) / batch.update_rows
            return replace(terms, loss=terms.loss + routers)
        terms = self._policy_loss(predicted, batch)
        return replace(terms, loss=terms.loss + sum(value.sum() for value in predicted.values.values()))

    def record_proximal(self) -> None:
        """Keeps the log-probs from before the first update, if the loss of the later updates needs them."""
        if not self._policy_loss.correction.needs_proximal:
            return
        with self.clock.part("forward"):
            self._updates[1:] = [
                [self.learner.with_proximal(batch.to(self.learner.device)) for batch in update]
                for update in self._updates[1:]
            ]

    def apply(self, step: int) -> float:
        """The optimiser's step towards `step`; returns the learning rate."""
        with self.clock.part("optimiser"):
            return self.learner.apply(step)

    def update_followers(self, step: int) -> None:
        """See `Learner.update_followers`."""
        self.learner.update_followers(step)

    def forget(self) -> None:
        """Drops the gradient."""
        self.learner.forget()

    def figures(self) -> dict[str, Any]:
        """The step's metrics so far, over all ranks, by the names of `StepReport`."""
        whole = copy.deepcopy(self._gauge)
        for sums in (whole.sums, whole.loss, whole.drift):
            self._ranks.total(sums)
        self._ranks.total(whole.peaks, peak=True)
        return whole.read()

    def weights(self) -> dict[str, Any]:
        """See `Learner.weights`."""
        return self.learner.weights()

    def adapters(self) -> dict[str, Any]:
        """See `Learner.adapters`."""
        return self.learner.adapters()

    def state(self) -> dict[str, Any]:
        """See `Learner.state`; with the recipe's fingerprint and state under `recipe`."""
        recipe = {**self._fingerprint, "state": self.recipe.state()}
        return {**self.learner.state(), "recipe": recipe}

    def _new_metrics(self, version: int) -> StepMetrics:
        return StepMetrics(self.learner.device, version, self._threshold)


def deal(batches: Sequence[Batch], ranks: int) -> list[list[Batch]]:
    """The batches of each rank: the same number for all, and batches of about equal length in each pass."""
    ordered = sorted(batches, key=lambda batch: batch.tokens, reverse=True)
    ordered += [empty_batch()] * (-len(ordered) % ranks)
    return [ordered[rank::ranks] for rank in range(ranks)]


class Workers:
    """The workers of all ranks, for the lead. A call runs on all of them and returns the lead's result."""

    def __init__(self, own: RankWorker, ranks: Ranks) -> None:
        self._own = own
        self._ranks = ranks

    def read(self, network: str, batches: Sequence[Batch]) -> list[Readout]:
        """The network's readout of each batch, in the order of `batches`."""
        shares = deal(batches, self._ranks.size)
        return _in_order(batches, shares, self._each("read", [(network, share) for share in shares]))

    def readouts(self, batches: Sequence[Batch]) -> list[Readout]:
        """The first update's readout of each of its `batches`, in their order."""
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
        """Ends `follow` on the other ranks."""
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
