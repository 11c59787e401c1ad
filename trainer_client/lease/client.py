"""Typed clients of the trainer plane, blocking and asynchronous: the second is written, the first is made of it.

Our own trainer uses nothing else, so any other trainer can do what it does (docs/bring-your-own-trainer.md). Groups are
delivered at least once and trained exactly once, if a trainer

1. acknowledges a lease *before* it applies the update made from it, and drops the update if that is refused;
2. calls `rewind(step, versions)` after restoring the checkpoint of `step`, before anything else;
3. keeps its name and `run` over restarts (`run_id` keeps one beside the checkpoints).

The rewind makes this client the owner of its policies. Every later call carries the incarnation that the rewind
returned, and raises `TrainerFenced` once another process is the owner: this process must then stop.

If the server, its store or its engine can't be reached, a call is repeated for `patience` seconds. That is safe:
repeating a call that was carried out changes nothing, except that a repeated `lease` may leave groups claimed until
they expire, and a repeated `nack` or `release` of a lease that has ended raises `LeaseLost`. Only `receive` is never
repeated.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TypedDict

import msgspec

from rolltap.contract.base import portions
from rolltap.contract.control import PolicyStatus, RolloutControl, SetControl
from rolltap.contract.planes import TrainerPlane
from rolltap.contract.trainer import (
    MAX_CALLS,
    MAX_SCORED,
    AckLease,
    AnnotateLease,
    BeginUpdate,
    CallAnnotation,
    ExtendLease,
    FinishUpdate,
    Lease,
    LeaseOptions,
    LeaseRequest,
    LeavePolicy,
    NackLease,
    PauseMode,
    PolicyScores,
    PushWeights,
    ReleaseLease,
    Rewind,
    Rewound,
    ScoredIds,
    ScoreIds,
    Transfer,
)
from rolltap.errors import RewindOvertaken
from rolltap.http_client import AnyHttpClient, AsyncHttpClient, HttpClient, blocking


class TrainerCaller(TypedDict):
    """The caller: a trainer, and the incarnation that its last rewind returned."""

    trainer: str
    incarnation: int


class TrainerIdentity(AnyHttpClient):
    """A client in the name of `trainer`.

    `run` is an id that a restarted trainer keeps; without one, each client is a new run. `timeout` limits one reply,
    and `patience` the repeated calls to an unreachable server, in seconds.
    """

    def __init__(
        self, url: str, key: str, trainer: str, *, run: str = "", timeout: float = 120.0, patience: float = 60.0
    ) -> None:
        super().__init__(url, key, timeout=timeout, patience=patience)
        self.run = run or uuid.uuid4().hex
        self.caller = TrainerCaller(trainer=trainer, incarnation=0)


class AsyncTrainerClient(TrainerIdentity, AsyncHttpClient):
    """The calls for asyncio, over one connection pool: `async with AsyncTrainerClient(...) as client`."""

    async def lease(self, policy: str, *, groups: int, options: LeaseOptions | None = None) -> Lease | None:
        """Up to `groups` whole groups; None if there are none within `options.wait` seconds."""
        terms = options or LeaseOptions()
        fields = {**msgspec.structs.asdict(terms), "at_least": min(terms.at_least or groups, groups)}
        request = LeaseRequest(policy=policy, groups=groups, **self.caller, **fields)
        return await self.reply(TrainerPlane.lease, request)

    async def extend(self, lease: Lease, ttl: float = 600.0) -> float:
        """Extends the lease to `ttl` seconds from now; returns the seconds left. `LeaseLost` if it has ended."""
        body = ExtendLease(lease.token, ttl, self.caller["incarnation"])
        return (await self.reply(TrainerPlane.extend, lease.id, body)).expires_in

    async def ack(self, lease: Lease, step: int) -> int:
        """Acknowledges the groups as part of `step`; returns how many. `LeaseLost`: do not train them."""
        body = AckLease(lease.token, step, self.caller["incarnation"])
        return (await self.reply(TrainerPlane.acknowledge, lease.id, body)).groups

    async def nack(self, lease: Lease, reason: str, blamed: tuple[str, ...] = ()) -> int:
        """Refuses groups that can't be trained. The `blamed` ones (default: all) count a failure.

        Returns how many groups are dead now.
        """
        body = NackLease(lease.token, reason, blamed, self.caller["incarnation"])
        return (await self.reply(TrainerPlane.refuse, lease.id, body)).dead

    async def release(self, lease: Lease) -> None:
        """Gives back groups that were not used: they can be leased again, and no failure is counted."""
        await self.tell(TrainerPlane.release, lease.id, ReleaseLease(lease.token, self.caller["incarnation"]))

    async def annotate(self, lease: Lease, calls: Sequence[CallAnnotation], *, version: int) -> int:
        """Adds what this trainer computed of the lease's sampled tokens with weights `version`. The viewer shows it.

        Returns how many calls had no annotation yet. A repeated call changes nothing; other values raise `LedgerError`.
        `InvalidRequest`: calls or lengths that do not match the lease. Acknowledged leases can be annotated, too.
        """
        added, rest = 0, AnnotateLease(lease.token, version, (), self.caller["incarnation"])
        for part in portions(calls, rest, MAX_CALLS):
            body = msgspec.structs.replace(rest, calls=part)
            added += (await self.reply(TrainerPlane.annotate, lease.id, body)).added
        return added

    async def rewind(self, step: int, versions: Mapping[str, int], *, take_over: bool = False) -> Rewound:
        """Reports that the checkpoint of `step` was restored, with the weight `versions` by policy.

        Groups acknowledged after it can be leased again, and later versions are abandoned. The reply has the version
        numbers of the restored weights. From now on this client owns the policies. `TrainerFenced` if another trainer
        owns one, unless told to `take_over`.
        """
        name = self.caller["trainer"]
        while True:
            # A rewind that a process which is gone has sent may come before this one, but not behind it.
            after = (await self.reply(TrainerPlane.trainer, name)).incarnation
            with suppress(RewindOvertaken):
                restored = Rewind(step, dict(versions), self.run, take_over, after)
                rewound = await self.reply(TrainerPlane.rewind, name, restored)
                self.caller["incarnation"] = rewound.incarnation
                return rewound

    async def policy(self, name: str) -> PolicyStatus:
        """The policy's state, with its counts of groups and rollouts; `UnknownPolicy` lists the known ones."""
        return await self.reply(TrainerPlane.policy, name)

    async def begin_update(self, policy: str, mode: PauseMode = "keep") -> None:
        """Pauses the policy's engines."""
        await self.tell(TrainerPlane.begin_update, policy, BeginUpdate(mode, **self.caller))

    async def push(self, policy: str, path: str, version: int, *, digest: str, adapter: bool = False) -> None:
        """The engines load the safetensors folder `path` (a path on their machine): a model's, or a peft adapter's.

        If that fails, the old version stays in service. `digest` (`model/weights.py`) is kept with the version:
        `LedgerError` if the number stands for other weights.
        """
        await self.tell(TrainerPlane.push, policy, PushWeights(path, version, digest, adapter, **self.caller))

    async def set_control(self, policy: str, control: RolloutControl) -> None:
        """Sets the control of the policy's future rollouts. It replaces the whole earlier control.

        `InvalidRequest` for a temperature at which the policy's calls could not be trained.
        """
        await self.tell(TrainerPlane.set_control, policy, SetControl(control=control, **self.caller))

    async def score(self, policy: str, sequences: Sequence[ScoredIds], *, top_logprobs: int = 0) -> PolicyScores:
        """The log-probs of given ids under the policy's weights, and the likeliest candidates; nothing is sampled.

        `InvalidRequest` for ids outside the policy's vocabulary, `ContextOverflow` for a sequence that is too long.
        """
        rest = ScoreIds((), top_logprobs)
        scores = [
            await self.reply(TrainerPlane.score, policy, msgspec.structs.replace(rest, sequences=part))
            for part in portions(sequences, rest, MAX_SCORED)
        ]
        versions = {each.version for each in scores}
        version = versions.pop() if len(versions) == 1 else None
        return PolicyScores(policy, version, [tokens for each in scores for tokens in each.sequences])

    async def ranks(self, policy: str) -> int:
        """The number of processes of the policy's engines that would receive a transfer now."""
        return (await self.reply(TrainerPlane.ranks, policy)).ranks

    async def receive(self, policy: str, transfer: Transfer) -> None:
        """The engines join the group and receive the weights that the trainer sends; returns once they serve them.

        `WeightsLost`: no engine serves until a push of all weights. Any other error: the old version stays in service.
        """
        await self.tell(TrainerPlane.receive, policy, transfer)

    async def finish_update(self, policy: str) -> None:
        """Resumes the policy's engines; `WeightsLost` if the last transfer of weights broke off."""
        await self.tell(TrainerPlane.finish_update, policy, FinishUpdate(**self.caller))

    async def leave(self, policy: str) -> None:
        """Tells that this trainer wants no more groups of the policy: rollouts that train others need not wait for it.

        It stays the owner. Its next lease asks again.
        """
        await self.tell(TrainerPlane.leave, policy, LeavePolicy(**self.caller))


class TrainerClient(TrainerIdentity, HttpClient):
    """The same calls, blocking; threads may share it."""

    lease = blocking(AsyncTrainerClient.lease)
    extend = blocking(AsyncTrainerClient.extend)
    ack = blocking(AsyncTrainerClient.ack)
    nack = blocking(AsyncTrainerClient.nack)
    release = blocking(AsyncTrainerClient.release)
    annotate = blocking(AsyncTrainerClient.annotate)
    rewind = blocking(AsyncTrainerClient.rewind)
    policy = blocking(AsyncTrainerClient.policy)
    begin_update = blocking(AsyncTrainerClient.begin_update)
    push = blocking(AsyncTrainerClient.push)
    set_control = blocking(AsyncTrainerClient.set_control)
    score = blocking(AsyncTrainerClient.score)
    ranks = blocking(AsyncTrainerClient.ranks)
    receive = blocking(AsyncTrainerClient.receive)
    finish_update = blocking(AsyncTrainerClient.finish_update)
    leave = blocking(AsyncTrainerClient.leave)
