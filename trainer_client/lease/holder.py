"""The leases of a training step: gathers enough groups, keeps their leases alive, and acknowledges or returns them.

A thread extends the leases, so none expires during a long forward pass. A lease that is lost nevertheless is noticed
when it is acknowledged, which happens before its groups change the weights. `WaitNotice` reports what the trainer waits
for and what was dropped, `AnswerWatch` ends a run in which no model answers.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from rolltap.contract.control import PolicyStatus
from rolltap.contract.trainer import CallAnnotation, Lease, LeasedGroup, LeaseOptions, Replay
from rolltap.errors import (
    AlignmentError,
    LeaseLost,
    RolltapError,
    ServerUnreachable,
    StoreUnavailable,
    TrainerError,
    TrainerFenced,
)
from rolltap.trainer_client.data.scoring import has_loss, informative
from rolltap.trainer_client.lease.client import TrainerClient
from rolltap.types import GroupStatus, RolloutStatus
from rolltap.wording import counted

log = logging.getLogger("rolltap.trainer")

MOST_LEASED = 4
"""If some groups do not count towards a step, it leases at most this many times the groups it needs."""


Trainable = Callable[[LeasedGroup], LeasedGroup]
Admits = Callable[[LeasedGroup], bool]


class LeaseHolder:
    """The leases of the current step, as a context manager: at exit, leases that were not acknowledged are released.

    With `keep_zero_variance`, groups whose rewards are all equal count towards a step. Groups for which `admits` is
    false, and those without a token that carries loss, never count. `trainable` gives a group as the trainer's model
    takes it; it raises `AlignmentError` for one that can't be trained: that is refused.
    """

    def __init__(
        self,
        client: TrainerClient,
        policy: str,
        options: LeaseOptions,
        *,
        keep_zero_variance: bool,
        trainable: Trainable,
        admits: Admits = lambda group: True,
    ) -> None:
        self.client = client
        self._policy = policy
        self._options = options
        self._keep_zero_variance = keep_zero_variance
        self._trainable = trainable
        self._admits = admits
        self._leases: list[Lease] = []
        self._acknowledged = False  # whether `_leases` are acknowledged, for a step not applied yet
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._extender = threading.Thread(target=self._extend, name="lease-extender", daemon=True)

    def __enter__(self) -> LeaseHolder:
        self._extender.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._extender.join()
        for lease in self._remove_all():
            _ignoring_errors(self.client.release, lease)

    @property
    def groups(self) -> tuple[LeasedGroup, ...]:
        """The groups of all leases; the groups of one lease are neighbours."""
        with self._lock:
            return tuple(group for lease in self._leases for group in lease.groups)

    def gather(
        self, count: int, stopping: Callable[[], bool], waiting: Callable[[int], None] = lambda missing: None
    ) -> bool:
        """Leases until `count` groups count towards the step; False if `stopping` comes first.

        Groups that can't be trained are refused. `waiting` is called with the number of missing groups after each
        request that returned none.
        """
        while (missing := count - sum(map(self._counts, self.groups))) > 0 and len(self.groups) < MOST_LEASED * count:
            if stopping():
                return False
            options = msgspec.structs.replace(self._options, at_least=missing, batch=count + self._extra_groups())
            lease = self.client.lease(self._policy, groups=missing, options=options)
            if lease is None:
                waiting(missing)
            else:
                self._keep(lease)
        return True

    def gather_replayed(self, count: int, replay: Replay) -> None:
        """Leases up to `count` groups that were trained before, in addition to the fresh ones. It does not wait."""
        options = msgspec.structs.replace(self._options, replay=replay, wait=0.0, at_least=1)
        lease = self.client.lease(self._policy, groups=count, options=options)
        if lease is not None:
            self._keep(lease)

    def acknowledge(self, step: int) -> bool:
        """Acknowledges the groups as part of `step`. False: lost groups were removed; make the update without them.

        Acknowledging a lease a second time has no effect.
        """
        acknowledged = []
        for lease in list(self._leases):
            try:
                self.client.ack(lease, step)
                acknowledged.append(lease)
            except LeaseLost:
                continue
        with self._lock:
            complete = len(acknowledged) == len(self._leases)
            self._leases = acknowledged
            self._acknowledged = bool(acknowledged)
        return complete

    def acknowledge_and_close(self, step: int) -> None:
        """Acknowledges groups that are trained in any case, and closes the holder.

        It retries as long as the server or its store is unreachable, since otherwise the groups would be leased again.
        Raises `TrainerFenced` if another trainer has the policy.
        """
        try:
            while True:
                try:
                    if not self.acknowledge(step):
                        log.error("the lease of a trained group was lost; another trainer may train it too")
                    return
                except (ServerUnreachable, StoreUnavailable) as error:
                    log.warning("trained groups are not acknowledged yet: %s", error.message)
        finally:
            self.clear()
            self.__exit__()

    def annotate(self, annotations: Sequence[CallAnnotation], version: int) -> None:
        """Adds what was computed of the groups' tokens to the record. A failure is logged: training continues."""
        for lease in list(self._leases):
            own = {
                turn.call_id
                for group in lease.groups
                for record in group.rollouts
                for segment in record.trajectory.segments
                for turn in segment.turns
            }
            try:
                self.client.annotate(lease, [one for one in annotations if one.call_id in own], version=version)
            except TrainerFenced:
                raise
            except RolltapError as error:
                log.warning("lease %s was not annotated: %s", lease.id, error.message)

    def clear(self) -> None:
        """Forgets the step's leases without a call to the server: the step is over."""
        self._remove_all()

    def refuse(self, reason: str) -> bool:
        """Refuses all groups, since no weights can be made from them: each counts a failure.

        False: they are acknowledged already (other groups were lost, and the gradient was computed again). Then only a
        rewind to the current weights makes them leasable again.
        """
        was_acknowledged, leases = self._acknowledged, self._remove_all()
        if not was_acknowledged:
            for lease in leases:
                _ignoring_errors(lambda leased: self.client.nack(leased, reason), lease)
        return not was_acknowledged

    def _extra_groups(self) -> int:
        """How many more groups a step may have because of those that do not count: else they take the others' room."""
        without = sum(1 for group in self.groups if not group.replay and not self._counts(group))
        return math.ceil(without / ((self._options.max_staleness or 0) + 1))

    def _counts(self, group: LeasedGroup) -> bool:
        if group.replay or not has_loss(group):
            return False
        return (self._keep_zero_variance or informative(group)) and self._admits(group)

    def _keep(self, lease: Lease) -> None:
        """Keeps the lease if every group can be trained. If not, refuses it and blames the groups that can't."""
        groups: list[LeasedGroup] = []
        faults: dict[str, str] = {}
        for group in lease.groups:
            try:
                groups.append(self._trainable(group))
            except AlignmentError as error:
                faults[group.group.id] = error.message
        if faults:
            reason = "; ".join(faults.values())
            _ignoring_errors(lambda one: self.client.nack(one, reason, tuple(faults)), lease)
        else:
            with self._lock:
                self._leases.append(replace(lease, groups=tuple(groups)))

    def _remove_all(self) -> list[Lease]:
        with self._lock:
            leases, self._leases, self._acknowledged = self._leases, [], False
        return leases

    def _extend(self) -> None:
        ttl = self._options.ttl
        while not self._closed.wait(ttl / 3):
            with self._lock:
                leases = list(self._leases)
            for lease in leases:
                _ignoring_errors(lambda one: self.client.extend(one, ttl), lease)


def _ignoring_errors(call: Callable[[Lease], object], lease: Lease) -> None:
    """Makes a call whose failure does not matter to the trainer: at the latest, the lease expires."""
    try:
        call(lease)
    except RolltapError:
        return


PrintLine = Callable[[str], None]

FIRST_S, EVERY_S = 10.0, 60.0
"""Seconds of waiting before the first line, and between two lines."""


class WaitNotice:
    """Reports about one wait, which begins when this is constructed. `print_line` prints a line.

    If the engines do not hold the policy's weights, nothing that they sample can be trained: then `push` is called.
    """

    def __init__(
        self, client: TrainerClient, policy: str, print_line: PrintLine, push: Callable[[], None] = lambda: None
    ) -> None:
        self._push = push
        self._client = client
        self._policy = policy
        self._print_line = print_line
        self._due = time.monotonic() + FIRST_S

    def report_wait(self, missing: int) -> None:
        """Prints the counts of the policy's groups, if a line is due; the step still needs `missing` groups."""
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + EVERY_S
        status = self._client.policy(self._policy)
        if status.weights:
            self._print_line(f"pushing the weights of {self._policy} again: {status.weights}")
            self._push()
        groups = status.groups
        ready, open_now, stale = (
            groups.get(status, 0) for status in (GroupStatus.COMPLETE, GroupStatus.OPEN, GroupStatus.STALE)
        )
        counts = f"{ready:,} ready, {open_now:,} under way, {stale:,} stale"
        self._print_line(f"waiting for {counted(missing, 'group')} of {self._policy}: {counts}")


LEAST_ENDED = 8
"""Rollouts that must have ended before a run is ended because no model answers."""


class AnswerWatch:
    """Counts the groups without loss and the rollouts without an answer that the server drops after `begin`."""

    def __init__(self, client: TrainerClient, policy: str, print_line: PrintLine) -> None:
        self._client = client
        self._policy = policy
        self._print_line = print_line
        self._began = self._last = (0, 0, 0)

    def begin(self, status: PolicyStatus) -> None:
        self._began = self._last = _counts(status)

    def check(self) -> None:
        """Prints what was dropped since the last check. `TrainerError` if most rollouts ended without an answer."""
        ended, unanswered, untrained = counts = _counts(self._client.policy(self._policy))
        _, last_unanswered, last_untrained = self._last
        self._last = counts
        if (new := untrained - last_untrained) > 0:
            self._print_line(f"{counted(new, 'group')} of {self._policy} dropped: no reply in them carries loss")
        if (new := unanswered - last_unanswered) > 0:
            self._print_line(f"{counted(new, 'rollout')} of {self._policy} without a model's answer: not trained")
        ended, unanswered = ended - self._began[0], unanswered - self._began[1]
        if ended >= LEAST_ENDED and 2 * unanswered > ended:
            raise TrainerError(
                f"no model answered in {unanswered} of the {ended} rollouts of {self._policy} that ended since this "
                "run began: look at one's reason (rolltap rollout ID); a harness that exits without a call has no "
                "network, another model URL, or a broken image"
            )

    def since_start(self) -> dict[str, int]:
        """The counts since the run began, by the names of `StepReport`."""
        return {
            "groups_dropped": self._last[2] - self._began[2],
            "rollouts_unanswered": self._last[1] - self._began[1],
        }


def _counts(status: PolicyStatus) -> tuple[int, int, int]:
    """All-time counts: rollouts that ended, rollouts without an answer, groups without loss."""
    ended = sum(count for name, count in status.rollouts.items() if RolloutStatus(name).terminal)
    return ended, status.unanswered, status.untrained
