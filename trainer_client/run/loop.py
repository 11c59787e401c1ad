"""The training loop, read top to bottom; then its process: ranks, signals, sinks.

    lease whole groups → credit → pack → forward, backward → acknowledge → optimiser step → checkpoint → push

Groups are acknowledged, with the step they belong to, before they change the weights. If the server answers that some
leases were lost, the gradient is computed again without their groups. A run that died resumes from its last checkpoint,
and `rewind` makes the groups that it acknowledged later leasable again. So no group is trained twice, and none is lost.
Every step makes one weight version; the numbers of versions that a rewind abandoned are not used again.
"""

from __future__ import annotations

import json
import math
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType
from typing import Any

import torch

from rolltap.contract.base import values_of
from rolltap.contract.control import PolicyStatus, RolloutControl
from rolltap.contract.trainer import LeasedGroup, LeaseOptions
from rolltap.errors import (
    AlignmentError,
    ConfigError,
    EngineUnavailable,
    RolltapError,
    StoreUnavailable,
    TrainerError,
    TrainerFenced,
    VersionTaken,
)
from rolltap.extras import page
from rolltap.tokenizer import download_hint
from rolltap.trainer_client.data.collate import Batch, collate
from rolltap.trainer_client.data.packing import Pack, PackedRow
from rolltap.trainer_client.data.scoring import has_loss, trainable
from rolltap.trainer_client.data.step import Pass, PolicyReading, ScoredPass, Step
from rolltap.trainer_client.lease.client import TrainerClient
from rolltap.trainer_client.lease.folder import locked, next_attempt, run_id
from rolltap.trainer_client.lease.holder import AnswerWatch, LeaseHolder, PrintLine, WaitNotice
from rolltap.trainer_client.lease.push import WeightSender, push_folder
from rolltap.trainer_client.model import architectures, weights
from rolltap.trainer_client.model.checkpoint import Checkpoints
from rolltap.trainer_client.model.lora import check_pushable
from rolltap.trainer_client.model.ranks import Ranks
from rolltap.trainer_client.run import planning
from rolltap.trainer_client.run.metrics import StepReport, call_annotations, describe_groups, describe_rows
from rolltap.trainer_client.run.sinks import Sink, Terminal, open_sinks
from rolltap.trainer_client.run.teachers import scored_reading
from rolltap.trainer_client.run.worker import RankWorker, Workers, follow
from rolltap.trainer_client.settings import TrainerSettings
from rolltap.wording import counted

LEASE_WAIT_S = 5.0
"""Seconds that one request for groups waits; between two requests, the trainer checks whether it should stop."""


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """The plan of a step: its groups, their rows in the loss, and the batches of each optimiser update.

    `first_packs` are the packs of the first update's batches.
    """

    groups: tuple[LeasedGroup, ...]
    rows: list[PackedRow]
    updates: list[list[Batch]]
    first_packs: list[Pack]


class Trainer:
    """One training run, driven by the lead of `ranks`. `print_line` prints a line, as about a long wait.

    Setting `stopping` ends the run after the current step, with a checkpoint.
    """

    def __init__(
        self,
        settings: TrainerSettings,
        client: TrainerClient,
        ranks: Ranks,
        sinks: Sequence[Sink] = (),
        print_line: PrintLine = lambda line: None,
    ) -> None:
        self.settings = settings
        self.client = client
        self.sinks = sinks
        self._print_line = print_line
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
        self._restored = saved
        self._watch = AnswerWatch(client, settings.policy, print_line)
        self._checkpointed_step = self.step
        self._attempt = 0
        self._control: RolloutControl | None = None  # the control that this run set last
        self._skipped_updates = 0  # updates of the current step whose gradient was not finite
        self._shares_rollouts = False  # with other policies' trainers, which would wait for this one
        self._served_folder = saved.folder if saved else settings.model
        self._pushes_adapters = settings.lora.rank > 0 and settings.lora.push == "adapter"
        distributed = settings.push.transfer == "distributed"
        self._sender = WeightSender(settings.push, ranks.device) if distributed else None
        self._rounds = settings.push.dtype != "float32"  # then engines load another folder than the checkpoint
        lead = RankWorker(settings, ranks, saved)
        if settings.lora.rank:
            check_pushable(lead.learner.model, settings.model)
        self._recipe = lead.recipe
        self._needs_checked = False
        self._planner = planning.Planner(lead.recipe, settings)
        self._model, self._clock = lead.learner.model, lead.clock
        self._experts = None if settings.router.replay == "off" else lead.learner.network.mixture.shape
        self._pack = self._planner.packer(ranks.size, alone=architectures.rows_alone(self._model.config))
        self._workers = Workers(lead, ranks)

    def run(self) -> None:
        """Trains until the last step of the settings, or until `stopping` is set."""
        self._resume()
        for sink in self.sinks:
            sink.begin(self.step)
        try:
            self._make_steps()
        except (TrainerError, AlignmentError):  # the run ends for a reason of its own
            with suppress(RolltapError):
                self._end_control()
            raise
        if self.step > self._checkpointed_step:  # `stopping` was set during the last step's checkpoint, or after it
            self._checkpoint()
            self.checkpoints.prune(self.step)
        self._end_control()
        if self._shares_rollouts:
            with suppress(TrainerFenced):
                self.client.leave(self.settings.policy)
        self._workers.dismiss()
        if self._sender is not None:
            self._sender.close()

    def _make_steps(self) -> None:
        with self._lease_holder() as leases:
            while self.step < self.settings.steps and not self.stopping:
                self._clock.seconds.clear()
                if self._gather(leases) and (report := self._train(leases)) is not None:
                    for sink in self.sinks:
                        sink.write(report)

    def _lease_holder(self) -> LeaseHolder:
        settings = self.settings
        options = LeaseOptions(
            max_staleness=settings.max_staleness,
            stale=settings.stale,
            tampered=settings.tampered,
            wait=LEASE_WAIT_S,
            ttl=settings.lease_ttl,
        )
        takes = partial(
            trainable,
            vocabulary=self._model.config.get_text_config().vocab_size,
            experts=self._experts,
            all_routed=settings.router.replay == "required",
        )
        return LeaseHolder(
            self.client,
            settings.policy,
            options,
            keep_zero_variance=not settings.loss.drop_zero_variance,
            trainable=takes,
            admits=self._recipe.admits,
        )

    def _gather(self, leases: LeaseHolder) -> bool:
        """Leases a step's groups, and earlier ones that the recipe replays; False if `stopping` was set first."""
        with self._clock.part("wait"):
            notice = WaitNotice(self.client, self.settings.policy, self._print_line, self._push)

            def waiting(missing: int) -> None:
                self._watch.check()
                notice.report_wait(missing)

            complete = leases.gather(self.settings.groups, lambda: self.stopping, waiting)
            self._shares_rollouts |= any(group.group.trains for group in leases.groups)
            self._watch.check()
            if complete and (replayed := self._recipe.replay(self.step + 1)) is not None:
                leases.gather_replayed(replayed.count, replayed.filter)
        return complete

    def _resume(self) -> None:
        """Makes server and engines agree with the checkpoint, or the initial model, that this run starts from.

        Adapters are always pushed: a restarted engine has no adapter of the policy's name. If the policy is paused, a
        run died while it pushed: pushing again also ends the pause.
        """
        policy = self.settings.policy
        rewound = self.client.rewind(self.step, {policy: self.version}, take_over=self.settings.take_over)
        # Not the incarnation alone: a restored backup of the server's store counts some again.
        self._attempt = next_attempt(self.settings.out, self.client.caller["incarnation"])
        if self.step > (rewound.last_step or 0):
            known = "no step" if rewound.last_step is None else f"step {rewound.last_step} as the last"
            self._print_line(
                f"the server's record is older than the checkpoint of step {self.step}: it knows {known} of this run, "
                "as a restored backup does. Groups that were trained since may be trained a second time"
            )
        if rewound.pruned:
            self._print_line(
                f"{rewound.pruned} groups that were trained after step {self.step} were pruned from the server's "
                "record: they are not trained again"
            )
        version = rewound.versions[policy]
        if self._restored and version != self.version:
            self.checkpoints.renumber(self._restored, version)
        self.version = version
        served = self.client.policy(policy)
        self._watch.begin(served)
        weights.check_tokenizer(policy, served.tokenizer_hash, self.settings.model)
        if self._pushes_adapters:
            self._save_adapters()
        elif self._restored and self._rounds and self._sender is None:
            self._save_weights()
        if self._pushes_adapters or served.version != self.version or served.paused is not None or served.weights:
            self._push_restored()
        self._take_over_control(served)
        self._set_control(self.step)

    def _take_over_control(self, served: PolicyStatus) -> None:
        """Takes over or ends the policy's current control.

        The rewind has ended another run's control. If this run set it before a restart, it ends if the recipe sets none
        now. If the admin plane set it, a line reports it.
        """
        if served.control == RolloutControl():
            return
        if served.control_run is not None:
            self._control = served.control
            if self._recipe.after(self.step) is None:
                self._end_control()
            return
        fields = {name: value for name, value in values_of(served.control).items() if value}
        until = "until this run replaces it" if self._recipe.after(self.step) is not None else "for this run's rollouts"
        self._print_line(f"{self.settings.policy} has a control from the admin plane, which holds {until}: {fields}")

    def _end_control(self) -> None:
        """Ends the control that this run set for future rollouts."""
        if self._control not in (None, RolloutControl()):
            with suppress(TrainerFenced):  # another run owns the policy, and its rewind ended the control
                self.client.set_control(self.settings.policy, RolloutControl())
            self._control = RolloutControl()

    def _push_restored(self) -> None:
        """Pushes the weights that the run starts from.

        Another run may have used the version number for its own fresh adapters: then this run's get the next number.
        """
        try:
            self._push()
        except VersionTaken:
            if self._restored:
                raise
            self.version += 1
            self._push()

    def _set_control(self, step: int) -> None:
        """Sets the recipe's control for rollouts that begin after `step` steps.

        Waits while an engine that must confirm it is unavailable. If the trainer stops first, the resumed run sets it.
        """
        control = self._recipe.after(step)
        while control is not None and control != self._control:
            try:
                self.client.set_control(self.settings.policy, control)
                self._control = control
            except EngineUnavailable as error:
                if self.stopping:
                    return
                self._print_line(f"waiting to set the control of {self.settings.policy}: {error.message}")

    def _train(self, leases: LeaseHolder) -> StepReport | None:
        """One step on the leased groups; None if it made no new weights.

        If groups are lost before the acknowledgement, they are removed and the gradient is computed again.
        """
        if not any(has_loss(group) for group in leases.groups):
            count = len(leases.groups)
            leases.acknowledge(self.step)
            leases.clear()
            self._print_line(f"no step of {counted(count, 'group')}: no reply in them carries loss")
            return None
        recipe_state = json.dumps(self._recipe.state())
        while leases.groups:
            self._recipe.restore(json.loads(recipe_state))
            plan = self._plan(leases.groups)
            self._workers.begin(self.version, plan.updates)
            norm = self._workers.gradient(0) if plan.updates else 0.0
            if not math.isfinite(norm):
                if not leases.refuse(f"step {self.step + 1}: the gradient's norm is {norm}"):
                    self.client.rewind(self.step, {self.settings.policy: self.version})
                break
            self._check_fidelity(plan)
            self._set_control(self.step + 1)  # first: the acknowledgement lets new groups open, under this control
            if leases.acknowledge(self.step + 1):
                return self._complete(plan, leases, norm)
            self._workers.forget()
        self._workers.forget()
        self._recipe.restore(json.loads(recipe_state))
        return None

    def _complete(self, plan: StepPlan, leases: LeaseHolder, norm: float) -> StepReport:
        """Applies the update of the acknowledged groups, and has the engines serve the new weights."""
        if self.settings.report.annotate and plan.updates:
            with self._clock.part("annotate"):
                readouts = self._workers.readouts(plan.updates[0])
                leases.annotate(call_annotations(plan.first_packs, readouts), self.version)
        lr = self._apply(plan)
        self.step += 1
        self.version += 1
        self._workers.update_followers(self.step)
        leases.clear()
        report = self._report(plan, norm, lr)
        for sink in self.sinks:
            sink.draft(report)
        self._publish()
        return replace(report, seconds=self._seconds())

    def _plan(self, groups: tuple[LeasedGroup, ...]) -> StepPlan:
        """The recipe's credit for the groups, and the batches of its updates."""
        admitted = [group for group in groups if self._recipe.admits(group)]
        step = planning.make_step(admitted, self.settings.loss, self.step + 1, self.settings.model)
        step = self._recipe.filtered(step)
        if admitted and not self._needs_checked:
            self._recipe.check(step)
            self._needs_checked = True
        passes = self._recipe.passes(step)
        step = replace(step, readings={name: self._read(step, requested) for name, requested in passes.items()})
        with self._clock.part("collate"):
            try:
                credit = self._recipe.credit(step)
                rows = planning.rows_to_train(step, credit, self.settings.loss, zeros=True)
                updates = self._planner.updates(step, credit)
            except AlignmentError as error:
                origin = f"recipe {self.settings.recipe!r}, step {step.number}"
                raise TrainerError(f"{origin}: {error.message}. The groups were given back") from error
            packs = [self._pack(update) for update in updates]
            batches = [
                [collate(pack, len(update)) for pack in packs_of_update]
                for update, packs_of_update in zip(updates, packs, strict=True)
            ]
            return StepPlan(groups, rows, batches, packs[0] if packs else [])

    def _read(self, step: Step, requested: Pass | ScoredPass) -> PolicyReading:
        """A reading of the step's rows, before the update, by a network or by another policy of the server."""
        if isinstance(requested, ScoredPass):
            with self._clock.part("read"):
                return scored_reading(self.client, requested, step)
        views = step.views() if requested.views is None else requested.views
        packs = self._pack(planning.rows_to_read(step, views))
        readouts = self._workers.read(requested.network, [collate(pack) for pack in packs])
        return planning.read_views(step, views, packs, readouts)

    def _check_fidelity(self, plan: StepPlan) -> None:
        """`TrainerError` if the engines' and the trainer's log-probs differ by more than `report.mismatch_stop`."""
        limit = self.settings.report.mismatch_stop
        if not plan.updates or not limit:
            return
        for age, mean in self._workers.figures()["mismatch"].items():
            if mean > limit:
                tokens = f"{age} versions behind" if age else "of the weights in training"
                raise TrainerError(
                    f"step {self.step + 1}: log-probs of engine and trainer differ by {mean:.2f} in the mean over the "
                    f"tokens {tokens}, and report.mismatch_stop is {limit:g}. They compute different models or sample "
                    f"differently ({page('trainer')}), or the policy moves too fast. The groups were given back"
                )

    def _apply(self, plan: StepPlan) -> float:
        """Applies the first update, whose gradient is computed, then the others; returns the learning rate."""
        if not plan.updates:
            return 0.0
        self._workers.record_proximal()
        lr = self._workers.apply(self.step + 1)
        self._skipped_updates = 0
        for index in range(1, len(plan.updates)):
            if math.isfinite(self._workers.gradient(index)):
                self._workers.apply(self.step + 1)
            else:
                self._workers.forget()
                self._skipped_updates += 1
        return lr

    def _publish(self) -> None:
        """Writes a checkpoint if one is due, and has the engines serve the step's weights."""
        last = self.stopping or self.step >= self.settings.steps
        state = None
        with self._clock.part("checkpoint"):
            if self.checkpoints.due(self.step, last):
                state = self._checkpoint()
            if self._pushes_adapters:
                self._save_adapters()
            elif self._sender is None and (state is None or self._rounds):
                self._save_weights(state)
        with self._clock.part("push"):
            self._push(state)
        self.checkpoints.prune(self.step)

    def _save_adapters(self) -> None:
        self._served_folder = self.checkpoints.save_adapters(self.step, self._workers.adapters(), self.settings.lora)

    def _save_weights(self, state: dict[str, Any] | None = None) -> None:
        self._served_folder = self.checkpoints.save_weights(self.step, self._model, self._pushed(state))

    def _pushed(self, state: dict[str, Any] | None) -> dict[str, Any]:
        """The weights as engines get them: `state`, or the current ones, in `push.dtype`."""
        state = state or self._workers.weights()
        if not self._rounds:
            return state
        return {name: one.bfloat16() if one.is_floating_point() else one for name, one in state.items()}

    def _checkpoint(self) -> dict[str, Any]:
        """Writes the step's checkpoint; returns its weights."""
        state = self._workers.weights()
        self._served_folder = self.checkpoints.save(self.step, self.version, self._model, state, self._workers.state())
        self._checkpointed_step = self.step
        return state

    def _push(self, state: dict[str, Any] | None = None) -> None:
        """Has the engines load the served folder, or receive the weights: `state` if the caller has gathered it."""
        policy, mode = self.settings.policy, self.settings.update_mode
        if self._sender is None:
            push_folder(self.client, policy, self._served_folder, self.version, mode, adapter=self._pushes_adapters)
        else:
            tensors = weights.sendable(self._model, self._pushed(state))
            self._sender.push(self.client, policy, tensors, self.version, mode)

    def _seconds(self) -> dict[str, float]:
        return {name: round(value, 4) for name, value in self._clock.seconds.items()}

    def _report(self, plan: StepPlan, norm: float, lr: float) -> StepReport:
        batches = [batch for update in plan.updates for batch in update]
        tokens = sum(batch.tokens for batch in batches)
        seconds = sum(self._clock.seconds[part] for part in ("forward", "backward", "optimiser"))
        return StepReport(
            step=self.step,
            attempt=self._attempt,
            version=self.version,
            grad_norm=norm if plan.updates else None,
            lr=lr if plan.updates else None,
            updates=len(plan.updates),
            updates_skipped=self._skipped_updates,
            tokens=tokens,
            shared_tokens=sum(batch.unshared_tokens for batch in batches) - tokens,
            tokens_per_second=tokens / seconds if seconds else 0.0,
            seconds=self._seconds(),
            **describe_groups(plan.groups),
            **self._watch.since_start(),
            **describe_rows(plan.rows, self._experts),
            **self._workers.figures(),
        )


FIRST_CONTACT_S = 5.0
"""Seconds that a server without an answer is tried at the start: its URL may be wrong."""


def run(settings: TrainerSettings) -> None:
    """Trains with `settings`. SIGTERM and SIGINT end the run after the current step."""
    if not (settings.model / "config.json").is_file():
        raise ConfigError(
            f"--model {settings.model} is not a model's folder: it has no config.json{download_hint(settings.model)}"
        )
    if settings.compute.threads:
        torch.set_num_threads(settings.compute.threads)
    torch.manual_seed(settings.seed)
    ranks = Ranks.of_environment(settings.compute.device)
    if ranks.lead:
        _lead(settings, ranks)
    else:
        with _signals_to(signal.SIG_IGN):  # torchrun forwards its signals to every rank; only the lead reacts
            follow(RankWorker(settings, ranks, None), ranks)
    ranks.leave()


def _lead(settings: TrainerSettings, ranks: Ranks) -> None:
    with suppress(StoreUnavailable, EngineUnavailable):  # the server answers: the run waits for it patiently, later
        TrainerClient(settings.url, settings.key, settings.name, patience=FIRST_CONTACT_S).policy(settings.policy)
    client = TrainerClient(settings.url, settings.key, settings.name, run=run_id(settings.out))
    with ExitStack() as stack:
        stack.enter_context(locked(settings.out))
        terminal = Terminal()
        sinks = [terminal, *open_sinks(settings.report.sinks, settings.out, settings.report.project, settings.name)]
        for sink in sinks:
            stack.callback(sink.close)
        trainer = Trainer(settings, client, ranks, sinks, terminal.say)

        def stop(*_: Any) -> None:
            trainer.stopping = True

        with _signals_to(stop):
            trainer.run()
        if trainer.stopping:
            terminal.say(f"stopped after step {trainer.step}; the same command goes on from there")


@contextmanager
def _signals_to(handler: Callable[[int, FrameType | None], Any] | signal.Handlers) -> Iterator[None]:
    """SIGTERM and SIGINT go to `handler` meanwhile; only a main thread may say so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {kind: signal.signal(kind, handler) for kind in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for kind, former in before.items():
            if former is not None:  # None: set by something else than Python
                signal.signal(kind, former)
