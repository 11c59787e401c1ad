"""Rebuilds the trajectories of a lease's groups from the call log, in this or another process. Read-only.

A server does this in another process (`rolltap.proxy.reading_process`), as it takes much more CPU time than the
ledger's own work. Tokens that the trainer must not train lose their loss here: calls that were recorded after their
rollout had ended, and with `stale="mask"` tokens that are too stale.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from rolltap.calllog.database import Database
from rolltap.contract.admin import NOTHING_SAMPLED
from rolltap.contract.trainer import Lease, LeasedGroup, LeaseRequest, RolloutRecord
from rolltap.errors import AlignmentError, RecordCorrupt
from rolltap.ledger.policies import VersionHistory
from rolltap.ledger.rows import load_for_training
from rolltap.ledger.unit_of_work import Tx
from rolltap.token_masks import per_token
from rolltap.types import NO_VERSION, ROUTED_EXPERTS, Group, Rollout, Scoring, Segment, Task, Trajectory

GROUPS_AT_ONCE = 16
"""Number of groups whose sessions are read and rebuilt together."""

TrainedCalls = Mapping[str, Sequence[str]]
"""The calls that each rollout had to train when it ended, by rollout id. Its reward knows no other calls: one that was
under way then, and completed later, is not trained."""


@dataclass(frozen=True, slots=True)
class OpenedLease:
    """A lease and its groups. If no group was ready, there is no lease and `token` is 0."""

    id: str
    token: int
    group_ids: tuple[str, ...]
    history: VersionHistory
    replay: bool = False
    mask_beyond: int | None = None  # tokens with a greater staleness lose their loss


@dataclass(frozen=True, slots=True)
class BrokenGroups:
    """Groups of a lease that cannot be rebuilt, with the reason by group id."""

    reasons: Mapping[str, str]


class Rebuilder(Protocol):
    """Rebuilds the trajectories of sessions, for the ledger."""

    async def trained_versions(self, session_id: str, policy: str) -> TrainedVersions:
        """What an ended rollout has to train of `policy`. Raises `RecordCorrupt` or `AlignmentError`."""
        ...

    async def lease(self, request: LeaseRequest, opened: OpenedLease, opened_at: float) -> Lease | BrokenGroups:
        """The lease with its groups' trajectories. `opened_at`: seconds on this machine's monotonic clock."""
        ...


class LocalRebuilder:
    """Rebuilds in this process. It only reads `database`; `trajectories` and `images` come from the call log."""

    def __init__(self, database: Database, trajectories: TrajectoriesOf, images: ImagesOf | None = None) -> None:
        self._database = database
        self._trajectories = trajectories
        self._images = images

    async def trained_versions(self, session_id: str, policy: str) -> TrainedVersions:
        (trajectory,) = await self._trajectories([session_id], policy)
        return TrainedVersions.of(trajectory)

    async def lease(self, request: LeaseRequest, opened: OpenedLease, opened_at: float) -> Lease | BrokenGroups:
        groups, tasks, trained = await self._database.query(
            lambda connection: load_for_training(Tx(connection, 0.0), opened.group_ids)
        )
        groups = [_score_tampered(group, request.tampered) for group in groups]
        leased: list[LeasedGroup] = []
        broken: dict[str, str] = {}
        for start in range(0, len(groups), GROUPS_AT_ONCE):
            leased += await self._rebuilt(groups[start : start + GROUPS_AT_ONCE], tasks, trained, opened, broken)
        if broken:
            return BrokenGroups(broken)
        return Lease(
            id=opened.id,
            trainer=request.trainer,
            policy=request.policy,
            token=opened.token,
            expires_in=max(0.0, request.ttl - (time.monotonic() - opened_at)),
            policy_version=opened.history.version,
            groups=tuple(leased),
        )

    async def _rebuilt(
        self,
        groups: Sequence[Group],
        tasks: Mapping[str, Task],
        trained: TrainedCalls,
        opened: OpenedLease,
        broken: dict[str, str],
    ) -> list[LeasedGroup]:
        """The groups with their trajectories. They are read together, or one by one if one of them cannot be rebuilt.

        Adds groups that cannot be rebuilt to `broken`.
        """
        session_ids = [session_id for group in groups for session_id in _sessions(group)]
        try:
            policy = groups[0].policy  # a lease is of one policy
            trajectories = dict(zip(session_ids, await self._trajectories(session_ids, policy), strict=True))
            for group in groups:
                for rollout in group.rollouts:
                    trajectory = trajectories.get(rollout.session_id or "")
                    if trained[rollout.id] and trajectory is not None and not trajectory.segments:
                        pruned = f"rollout {rollout.id}: the calls of session {rollout.session_id} were removed"
                        raise RecordCorrupt(pruned)
            images = await self._files(trajectories.values())
        except (RecordCorrupt, AlignmentError) as error:
            if len(groups) == 1:
                broken[groups[0].id] = f"{error.code}: {error.message}"
                return []
            return [one for group in groups for one in await self._rebuilt([group], tasks, trained, opened, broken)]
        scored = [rollout for group in groups for rollout in group.rollouts if rollout.scoring is Scoring.SCORED]
        for rollout in scored:
            if rollout.session_id in trajectories:
                trajectory = trajectories[rollout.session_id]
                trajectories[rollout.session_id] = without_late_calls(trajectory, frozenset(trained[rollout.id]))
        if (most := opened.mask_beyond) is not None:
            trajectories = {id: without_stale(one, opened.history, most) for id, one in trajectories.items()}
        return [_leased_group(group, tasks[group.id], trajectories, images, opened) for group in groups]

    async def _files(self, trajectories: Iterable[Trajectory]) -> Mapping[str, bytes]:
        """The files of the trajectories' images. Raises `RecordCorrupt` if one is not in the log."""
        digests = {image.digest for one in trajectories for segment in one.segments for image in segment.images}
        if not digests:
            return {}
        images = await self._images(digests) if self._images is not None else {}
        if missing := digests - images.keys():
            raise RecordCorrupt(f"image {min(missing)} is not in the log")
        return images


def _sessions(group: Group) -> list[str]:
    """The sessions whose trajectories a trainer needs."""
    return [
        rollout.session_id
        for rollout in group.rollouts
        if rollout.session_id and rollout.scoring is not Scoring.UNSCORABLE
    ]


def _score_tampered(group: Group, tampered: str) -> Group:
    """The group with the scoring of tampered rollouts set by the option `tampered` ("keep", "drop" or "mask")."""
    if tampered == "keep" or not any(rollout.tampering for rollout in group.rollouts):
        return group
    counts_as = Scoring.UNSCORABLE if tampered == "drop" else Scoring.MASKED
    rollouts = (
        replace(rollout, scoring=counts_as)
        if rollout.tampering and rollout.scoring is not Scoring.UNSCORABLE
        else rollout
        for rollout in group.rollouts
    )
    return replace(group, rollouts=tuple(rollouts))


def scored_if_played(group: Group, rollout: Rollout, trajectory: Trajectory | None) -> Rollout:
    """The rollout of the group, unscorable if only other policies that are trained in it sampled something."""
    if not group.trains or trajectory is None or answered(trajectory):
        return rollout
    return replace(rollout, scoring=Scoring.UNSCORABLE, reason=rollout.reason or NOTHING_SAMPLED)


def _leased_group(
    group: Group,
    task: Task,
    trajectories: Mapping[str, Trajectory],
    images: Mapping[str, bytes],
    opened: OpenedLease,
) -> LeasedGroup:
    """The leased group. `trajectories` is by session id; an unscorable rollout gets an empty trajectory."""
    played = (scored_if_played(group, one, trajectories.get(one.session_id or "")) for one in group.rollouts)
    group = replace(group, rollouts=tuple(played))
    records = tuple(
        RolloutRecord(
            rollout,
            trajectories.get(rollout.session_id or "") or Trajectory(rollout.session_id or "", (), (), {}),
            group.reward_of(rollout),
        )
        for rollout in group.rollouts
    )
    trained = [TrainedVersions.of(record.trajectory) for record in records if record.rollout.scoring is Scoring.SCORED]
    known = [versions for versions in trained if versions.oldest != NO_VERSION]
    oldest = min((versions.oldest for versions in known), default=NO_VERSION)
    return LeasedGroup(
        group=group,
        task=task,
        rollouts=records,
        oldest_version=oldest,
        newest_version=max((versions.newest for versions in known), default=NO_VERSION),
        staleness=0 if oldest == NO_VERSION else opened.history.behind(oldest),
        replay=opened.replay,
        images={
            image.digest: images[image.digest]
            for record in records
            for segment in record.trajectory.segments
            for image in segment.images
        },
    )


LATE = "late"
"""The mask reason of a call that came to the store after its rollout's end was settled."""


def without_stale(trajectory: Trajectory, history: VersionHistory, max_staleness: int) -> Trajectory:
    """The trajectory with loss only on tokens of staleness `max_staleness` or less, and not of abandoned versions."""
    segments: list[Segment] = []
    for segment in trajectory.segments:
        versions = np.unique(segment.versions[segment.loss_mask]).tolist()
        stale = [version for version in versions if not history.is_fresh(version, max_staleness)]
        segments.append(_masked(segment, np.isin(segment.versions, stale)) if stale else segment)
    return replace(trajectory, segments=tuple(segments))


def without_late_calls(trajectory: Trajectory, known: Collection[str]) -> Trajectory:
    """The trajectory with loss only on the calls in `known`: those that were recorded when their rollout was scored."""
    late = {
        turn.call_id: turn.end - turn.start
        for segment in trajectory.segments
        for turn in segment.turns
        if turn.trained and turn.call_id not in known
    }
    if not late:
        return trajectory
    segments = tuple(_only_known(segment, known) for segment in trajectory.segments)
    counts = dict(trajectory.counts)
    counts["trained_calls"] = counts.get("trained_calls", 0) - len(late)
    counts["trained_tokens"] = sum(int(segment.loss_mask.sum()) for segment in segments)
    counts["masked_calls.late"] = len(late)
    counts["masked_tokens.late"] = sum(late.values())
    classifications = tuple(
        replace(one, mask=LATE) if one.call_id in late else one for one in trajectory.classifications
    )
    return replace(trajectory, segments=segments, counts=counts, classifications=classifications)


def _only_known(segment: Segment, known: Collection[str]) -> Segment:
    late = [turn for turn in segment.turns if turn.trained and turn.call_id not in known]
    if not late:
        return segment
    masked = np.zeros(len(segment), dtype=bool)
    for turn in late:
        masked[turn.start : turn.end] = True
    return _masked(segment, masked)


def _masked(segment: Segment, masked: np.ndarray) -> Segment:
    """The segment without loss on the tokens in `masked`, a boolean [L]."""
    kept = segment.loss_mask & ~masked
    return replace(
        segment,
        loss_mask=kept,
        logprobs=np.where(kept, segment.logprobs, np.float32(0)),
        versions=np.where(kept, segment.versions, np.int32(NO_VERSION)),
        turns=tuple(replace(turn, trained=bool(kept[turn.start : turn.end].any())) for turn in segment.turns),
        extras=per_token(  # routed experts are kept, as they are needed for context tokens as well
            segment.extras, lambda name, array: array if name == ROUTED_EXPERTS else _cleared(array, ~kept)
        ),
    )


def _cleared(array: np.ndarray, where: np.ndarray) -> np.ndarray:
    cleared = array.copy()
    cleared[where] = 0
    return cleared


class ImagesOf(Protocol):
    """`CallLog.images`."""

    async def __call__(self, digests: Collection[str], /) -> Mapping[str, bytes]: ...


class TrajectoriesOf(Protocol):
    """Rebuilds the trajectories of sessions, in the order of their ids: the reconstructor on the call log.

    Calls of `policy` carry loss; "": of each session's own policy.
    """

    async def __call__(self, session_ids: Sequence[str], policy: str = "", /) -> Sequence[Trajectory]: ...


@dataclass(frozen=True, slots=True)
class TrainedVersions:
    """A trajectory's oldest and newest weight version over its trained tokens, and its trained calls.

    `sampled`: whether the policy answered anything in it, as tokens or as text.
    """

    oldest: int = NO_VERSION
    newest: int = NO_VERSION
    calls: tuple[str, ...] = ()
    sampled: bool = True

    @classmethod
    def of(cls, trajectory: Trajectory) -> TrainedVersions:
        calls = tuple(turn.call_id for segment in trajectory.segments for turn in segment.turns if turn.trained)
        sampled = answered(trajectory)
        versions = [segment.versions for segment in trajectory.segments if len(segment)]
        newest = max((int(array.max()) for array in versions), default=NO_VERSION)
        if newest == NO_VERSION:
            return cls(calls=calls, sampled=sampled)
        # Untrained tokens have version -1, which is the largest number when read as unsigned.
        return cls(min(int(array.view(np.uint32).min()) for array in versions), newest, calls, sampled)


def answered(trajectory: Trajectory) -> bool:
    """Whether the policy answered anything in the session."""
    return trajectory.counts.get("answers", 0) > 0
