"""The training loop, read top to bottom.

    lease whole groups → credit → pack → forward, backward → acknowledge → optimiser step → checkpoint → push

Groups are acknowledged, with the step they lead to, before they change the weights; if some turn out to be somebody
else's by then, the gradient is made again without them. A run that died goes on from its last checkpoint, and `rewind`
brings back what was acknowledged after it. So nothing is trained twice, and nothing is lost. Every step is a weight
version more; numbers of versions that a rewind abandoned are not used again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rolltap.contract.leases import LeasedGroup
from rolltap.contract.trainer import LeaseOptions
from rolltap.errors import AlignmentError, TrainerError, VersionTaken
from rolltap.trainer_client import architectures, planning, weights
from rolltap.trainer_client.annotating import call_annotations
from rolltap.trainer_client.checkpoint import Checkpoints
from rolltap.trainer_client.client import TrainerClient
from rolltap.trainer_client.collate import Batch, collate
from rolltap.trainer_client.distributed import Workers
from rolltap.trainer_client.leases import LeaseHolder
from rolltap.trainer_client.metrics import StepReport, describe_groups, describe_rows
from rolltap.trainer_client.packing import Pack, PackedRow
from rolltap.trainer_client.ranks import Ranks
from rolltap.trainer_client.recipe import Pass, ScoredPass
from rolltap.trainer_client.scoring import check
from rolltap.trainer_client.sender import WeightSender
from rolltap.trainer_client.settings import TrainerSettings
from rolltap.trainer_client.sinks import Sink
from rolltap.trainer_client.step import PolicyReading, Step
from rolltap.trainer_client.teachers import scored_reading
from rolltap.trainer_client.worker import RankWorker

LEASE_WAIT_S = 5.0
"""How long one request for groups waits; between two, the trainer notices that it should stop."""


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """What a step makes of its groups: the rows in the loss, and in `updates` the batches of each optimiser step.

    `first` are the packs of the first of these.
    """

    groups: tuple[LeasedGroup, ...]
    rows: list[PackedRow]
    updates: list[list[Batch]]
    first: list[Pack]


class Trainer:
    """One training run, made by the lead of `ranks`.

    Setting `stopping` ends it after the step under way, with a checkpoint.
    """

    def __init__(
        self, settings: TrainerSettings, client: TrainerClient, ranks: Ranks, sinks: Sequence[Sink] = ()
    ) -> None:
        self.settings = settings
        self.client = client
        self.sinks = sinks
        self.stopping = False
        self.checkpoints = Checkpoints(
            settings.out,
            settings.policy,
            settings.model,
            every=settings.checkpoint_every,
            count=settings.checkpoints_kept,
        )
        self.checkpoints.sweep()
        saved = self.checkpoints.latest()
        self.step, self.version = (saved.step, saved.version) if saved else (0, 0)
        self._saved = saved
        self._saved_step = self.step
        self._cap: int | None = None  # of turns, as this run last set it
        self._skipped = 0  # updates of the step under way whose gradient was not finite
        self._folder = saved.folder if saved else settings.model
        self._adapters = settings.lora.rank > 0 and settings.lora.push == "adapter"
        distributed = settings.push.transfer == "distributed"
        self._sender = WeightSender(settings.push, ranks.device) if distributed else None
        own = RankWorker(settings, ranks, saved)
        self._recipe, self._first = own.recipe, True
        self._planner = planning.Planner(own.recipe, settings)
        self._model, self._clock = own.learner.model, own.clock
        self._experts = None if settings.router.replay == "off" else own.learner.network.mixture.shape
        self._pack = self._planner.packer(ranks.size, alone=architectures.rows_alone(self._model.config))
        self._workers = Workers(own, ranks)

    def run(self) -> None:
        """Trains up to the settings' step, or until told to stop."""
        self._take_over()
        options = LeaseOptions(
            max_staleness=self.settings.max_staleness,
            stale=self.settings.stale,
            tampered=self.settings.tampered,
            wait=LEASE_WAIT_S,
            ttl=self.settings.lease_ttl,
        )
        with LeaseHolder(
            self.client,
            self.settings.policy,
            options,
            keep_zero_variance=not self.settings.loss.drop_zero_variance,
            check=partial(
                check,
                vocabulary=self._model.config.vocab_size,
                experts=self._experts,
                all_routed=self.settings.router.replay == "required",
            ),
        ) as leases:
            while self.step < self.settings.steps and not self.stopping:
                self._clock.seconds.clear()
                with self._clock.part("wait"):
                    ready = leases.gather(self.settings.groups, lambda: self.stopping)
                    if ready and (again := self._recipe.replay(self.step + 1)) is not None:
                        leases.recall(again.count, again.filter)
                if ready and (report := self._train(leases)) is not None:
                    for sink in self.sinks:
                        sink.write(report)
        if self.step > self._saved_step:  # it was told to stop when the last step was being handed over, or after it
            self._checkpoint()
            self.checkpoints.prune(self.step)
        self._workers.dismiss()
        if self._sender is not None:
            self._sender.close()

    def _take_over(self) -> None:
        """Makes server and engines agree with the checkpoint, or the model, that this run goes on from.

        Adapters are always pushed: until then an engine that was started anew has none of the policy's name.
        A policy that is paused was left so by a run that died while it pushed: pushing again ends that, too.
        """
        policy = self.settings.policy
        rewound = self.client.rewind(self.step, {policy: self.version}, take_over=self.settings.take_over)
        version = rewound.versions[policy]
        if self._saved and version != self.version:
            self.checkpoints.renumber(self._saved, version)
        self.version = version
        served = self.client.policy(policy)
        weights.check_tokenizer(policy, served.tokenizer_hash, self.settings.model)
        if self._adapters:
            self._save_adapters()
        if self._adapters or served.version != self.version or served.paused is not None:
            self._push_restored()
        self._cap_turns()

    def _push_restored(self) -> None:
        """Another run may have given the number to fresh adapters of its own: those of this one get the next."""
        try:
            self._push()
        except VersionTaken:
            if self._saved:
                raise
            self.version += 1
            self._push()

    def _cap_turns(self) -> None:
        """Attempts that begin from now on have the recipe's cap."""
        cap = self._recipe.turn_cap(self.step)
        if cap is not None and cap != self._cap:
            self.client.cap_turns(self.settings.policy, cap)
            self._cap = cap

    def _train(self, leases: LeaseHolder) -> StepReport | None:
        """One step on the groups held; None if no weights came of it."""
        before = json.dumps(self._recipe.state())
        while leases.groups:
            self._recipe.restore(json.loads(before))
            plan = self._plan(leases.groups)
            self._workers.begin(self.version, plan.updates)
            norm = self._workers.gradient(0) if plan.updates else 0.0
            if not math.isfinite(norm):
                if not leases.refuse(f"step {self.step + 1}: the gradient's norm is {norm}"):
                    self.client.rewind(self.step, {self.settings.policy: self.version})
                break
            self._check_fidelity(plan)
            if leases.acknowledge(self.step + 1):
                self._annotate(plan, leases)
                lr = self._apply(plan)
                self.step += 1
                self.version += 1
                self._workers.settle(self.step)
                leases.done()
                self._hand_over()
                self._cap_turns()
                return self._report(plan, norm, lr)
            self._workers.forget()
        self._workers.forget()
        self._recipe.restore(json.loads(before))
        return None

    def _plan(self, groups: tuple[LeasedGroup, ...]) -> StepPlan:
        """The recipe's credit for the groups, and the batches of its updates."""
        step = planning.look(groups, self.settings.loss, self.step + 1, self.settings.model)
        if self._first:
            self._recipe.check(step)
            self._first = False
        step = replace(step, readings={name: self._read(step, one) for name, one in self._recipe.passes(step).items()})
        with self._clock.part("collate"):
            try:
                credit = self._recipe.credit(step)
                rows = planning.rows_to_train(step, credit, self.settings.loss, still=True)
                updates = self._planner.updates(step, credit)
            except AlignmentError as error:
                by = f"recipe {self.settings.recipe!r}, step {step.number}"
                raise TrainerError(f"{by}: {error.message}. No group was acknowledged; all are given back") from error
            packs = [self._pack(update) for update in updates]
            batches = [[collate(p, len(update)) for p in own] for update, own in zip(updates, packs, strict=True)]
            return StepPlan(groups, rows, batches, packs[0] if packs else [])

    def _annotate(self, plan: StepPlan, leases: LeaseHolder) -> None:
        """What the first update computed goes on record, before the weights that it makes can be lost."""
        if self.settings.report.annotate and plan.updates:
            with self._clock.part("annotate"):
                readouts = self._workers.readouts(plan.updates[0])
                leases.annotate(call_annotations(plan.first, readouts), self.version)

    def _read(self, step: Step, one: Pass | ScoredPass) -> PolicyReading:
        """What a network, or a policy of the server, says of the step before it."""
        if isinstance(one, ScoredPass):
            with self._clock.part("read"):
                return scored_reading(self.client, one, step)
        views = step.views() if one.views is None else one.views
        packs = self._pack(planning.rows_to_read(step, views))
        readouts = self._workers.read(one.network, [collate(pack) for pack in packs])
        return planning.read_views(step, views, packs, readouts)

    def _check_fidelity(self, plan: StepPlan) -> None:
        """`TrainerError` where the engines' log-probs can't be those of the weights in training, or near them."""
        most = self.settings.report.mismatch_stop
        if not plan.updates or not most:
            return
        for age, mean in self._workers.figures()["mismatch"].items():
            if mean > most:
                of = f"{age} versions behind" if age else "of the weights in training"
                raise TrainerError(
                    f"step {self.step + 1}: log-probs of engine and trainer differ by {mean:.2f} in the mean over the "
                    f"tokens {of}, and report.mismatch_stop is {most:g}. They compute different models or sample "
                    "differently (docs/trainer.md), or the policy moves too fast. The groups were given back"
                )

    def _apply(self, plan: StepPlan) -> float:
        """The first update's optimiser step, then the other updates; returns the learning rate."""
        if not plan.updates:
            return 0.0
        self._workers.keep_proximal()
        lr = self._workers.apply(self.step + 1)
        self._skipped = 0
        for index in range(1, len(plan.updates)):
            if math.isfinite(self._workers.gradient(index)):
                self._workers.apply(self.step + 1)
            else:
                self._workers.forget()
                self._skipped += 1
        return lr

    def _hand_over(self) -> None:
        """Makes the step durable, if it is one of those, and the engines serve it."""
        last = self.stopping or self.step >= self.settings.steps
        state = None
        with self._clock.part("checkpoint"):
            if self.checkpoints.due(self.step, last):
                state = self._checkpoint()
            elif not self._adapters and self._sender is None:
                self._folder = self.checkpoints.save_weights(self.step, self._model, self._workers.weights())
            if self._adapters:
                self._save_adapters()
        with self._clock.part("push"):
            self._push(state)
        self.checkpoints.prune(self.step)

    def _save_adapters(self) -> None:
        self._folder = self.checkpoints.save_adapters(self.step, self._workers.adapters(), self.settings.lora)

    def _checkpoint(self) -> dict[str, Any]:
        """Makes the step durable; the weights that it has."""
        state = self._workers.weights()
        self._folder = self.checkpoints.save(self.step, self.version, self._model, state, self._workers.state())
        self._saved_step = self.step
        return state

    def _push(self, state: dict[str, Any] | None = None) -> None:
        """The engines take over what is trained: its folder, or the weights, which are `state` where they are known."""
        policy, mode = self.settings.policy, self.settings.update_mode
        if self._sender is None:
            weights.push(self.client, policy, self._folder, self.version, mode, adapter=self._adapters)
        else:
            sent = weights.sendable(self._model, state or self._workers.weights())
            self._sender.push(self.client, policy, sent, self.version, mode)

    def _report(self, plan: StepPlan, norm: float, lr: float) -> StepReport:
        batches = [batch for update in plan.updates for batch in update]
        computed = sum(batch.tokens for batch in batches)
        busy = sum(self._clock.seconds[part] for part in ("forward", "backward", "optimiser"))
        return StepReport(
            step=self.step,
            version=self.version,
            grad_norm=norm,
            lr=lr,
            updates=len(plan.updates),
            updates_skipped=self._skipped,
            tokens=computed,
            shared_tokens=sum(batch.unshared_tokens for batch in batches) - computed,
            tokens_per_second=computed / busy if busy else 0.0,
            seconds={name: round(value, 4) for name, value in self._clock.seconds.items()},
            **describe_groups(plan.groups),
            **describe_rows(plan.rows, self._experts),
            **self._workers.figures(),
        )
