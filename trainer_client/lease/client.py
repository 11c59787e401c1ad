"""Typed clients of the trainer plane, blocking and asynchronous.

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

import rolltap.trainer_client.lease.protocol as protocol
from rolltap.contract.control import PolicyStatus, RolloutControl
from rolltap.contract.trainer import (
    CallAnnotation,
    Lease,
    LeaseOptions,
    PauseMode,
    PolicyScores,
    PushWeights,
    Rewind,
    Rewound,
    ScoredIds,
    ScoreIds,
    Transfer,
)
from rolltap.http_client import AsyncHttpClient, HttpClient
from rolltap.trainer_client.lease.protocol import TrainerCaller


class TrainerClient(HttpClient):
    """Blocking calls to one server in the name of `trainer`; threads may share it.

    `run` is an id that a restarted trainer keeps; without one, each client is a new run. `timeout` limits one reply,
    and `patience` the repeated calls to an unreachable server, in seconds.
    """

    def __init__(
        self, url: str, key: str, trainer: str, *, run: str = "", timeout: float = 120.0, patience: float = 60.0
    ) -> None:
        super().__init__(url, key, timeout=timeout, patience=patience)
        self.run = run or uuid.uuid4().hex
        self.caller = TrainerCaller(trainer=trainer, incarnation=0)

    def lease(self, policy: str, *, groups: int, options: LeaseOptions | None = None) -> Lease | None:
        """Up to `groups` whole groups; None if there are none within `options.wait` seconds."""
        return self.send(protocol.lease(self.caller, policy, groups, options or LeaseOptions()))

    def extend(self, lease: Lease, ttl: float = 600.0) -> float:
        """Extends the lease to `ttl` seconds from now; returns the seconds left. `LeaseLost` if it has ended."""
        return self.send(protocol.extend(self.caller, lease, ttl)).expires_in

    def ack(self, lease: Lease, step: int) -> int:
        """Acknowledges the groups as part of `step`; returns how many. `LeaseLost`: do not train them."""
        return self.send(protocol.ack(self.caller, lease, step)).groups

    def nack(self, lease: Lease, reason: str, blamed: tuple[str, ...] = ()) -> int:
        """Refuses groups that can't be trained. The `blamed` ones (default: all) count a failure.

        Returns how many groups are dead now.
        """
        return self.send(protocol.nack(self.caller, lease, reason, blamed)).dead

    def release(self, lease: Lease) -> None:
        """Gives back groups that were not used: they can be leased again, and no failure is counted."""
        self.send(protocol.release(self.caller, lease))

    def annotate(self, lease: Lease, calls: Sequence[CallAnnotation], *, version: int) -> int:
        """Adds what this trainer computed of the lease's sampled tokens with weights `version`. The viewer shows it.

        Returns how many calls had no annotation yet. A repeated call changes nothing; other values raise `LedgerError`.
        `InvalidRequest`: calls or lengths that do not match the lease. Acknowledged leases can be annotated, too.
        """
        return sum(self.send(request).added for request in protocol.annotate(self.caller, lease, version, calls))

    def rewind(self, step: int, versions: Mapping[str, int], *, take_over: bool = False) -> Rewound:
        """Reports that the checkpoint of `step` was restored, with the weight `versions` by policy.

        Groups acknowledged after it can be leased again, and later versions are abandoned. The reply has the version
        numbers of the restored weights. From now on this client owns the policies. `TrainerFenced` if another trainer
        owns one, unless told to `take_over`.
        """
        restored = Rewind(step, dict(versions), self.run, take_over)
        rewound = self.send(protocol.rewind(self.caller["trainer"], restored))
        self.caller["incarnation"] = rewound.incarnation
        return rewound

    def policy(self, name: str) -> PolicyStatus:
        """The policy's state, with its counts of groups and rollouts; `UnknownPolicy` lists the known ones."""
        return self.send(protocol.policy(name))

    def begin_update(self, policy: str, mode: PauseMode = "keep") -> None:
        """Pauses the policy's engines."""
        self.send(protocol.begin_update(self.caller, policy, mode))

    def push(self, policy: str, path: str, version: int, *, digest: str, adapter: bool = False) -> None:
        """The engines load the safetensors folder `path` (a path on their machine): a model's, or a peft adapter's.

        If that fails, the old version stays in service. `digest` (`model/weights.py`) is kept with the version:
        `LedgerError` if the number stands for other weights.
        """
        self.send(protocol.push(policy, PushWeights(path, version, digest, adapter, **self.caller)))

    def set_control(self, policy: str, control: RolloutControl) -> None:
        """Sets the control of the policy's future rollouts. It replaces the whole earlier control.

        `InvalidRequest` for a temperature at which the policy's calls could not be trained.
        """
        self.send(protocol.set_control(self.caller, policy, control))

    def score(self, policy: str, sequences: Sequence[ScoredIds], *, top_logprobs: int = 0) -> PolicyScores:
        """The log-probs of given ids under the policy's weights, and the likeliest candidates; nothing is sampled.

        `InvalidRequest` for ids outside the policy's vocabulary, `ContextOverflow` for a sequence that is too long.
        """
        return self.send(protocol.score(policy, ScoreIds(tuple(sequences), top_logprobs)))

    def ranks(self, policy: str) -> int:
        """The number of processes of the policy's engines that would receive a transfer now."""
        return self.send(protocol.ranks(policy)).ranks

    def receive(self, policy: str, transfer: Transfer) -> None:
        """The engines join the group and receive the weights that the trainer sends; returns once they serve them.

        `WeightsLost`: no engine serves until a push of all weights. Any other error: the old version stays in service.
        """
        self.send(protocol.receive(policy, transfer))

    def finish_update(self, policy: str) -> None:
        """Resumes the policy's engines; `WeightsLost` if the last transfer of weights broke off."""
        self.send(protocol.finish_update(self.caller, policy))

    def leave(self, policy: str) -> None:
        """Tells that this trainer wants no more groups of the policy: rollouts that train others need not wait for it.

        It stays the owner. Its next lease asks again.
        """
        self.send(protocol.leave(self.caller, policy))


class AsyncTrainerClient(AsyncHttpClient):
    """The same calls for asyncio, over one connection pool: `async with AsyncTrainerClient(...) as client`."""

    def __init__(
        self, url: str, key: str, trainer: str, *, run: str = "", timeout: float = 120.0, patience: float = 60.0
    ) -> None:
        super().__init__(url, key, timeout=timeout, patience=patience)
        self.run = run or uuid.uuid4().hex
        self.caller = TrainerCaller(trainer=trainer, incarnation=0)

    async def lease(self, policy: str, *, groups: int, options: LeaseOptions | None = None) -> Lease | None:
        """See `TrainerClient.lease`; the same holds for every method here."""
        return await self.send(protocol.lease(self.caller, policy, groups, options or LeaseOptions()))

    async def extend(self, lease: Lease, ttl: float = 600.0) -> float:
        return (await self.send(protocol.extend(self.caller, lease, ttl))).expires_in

    async def ack(self, lease: Lease, step: int) -> int:
        return (await self.send(protocol.ack(self.caller, lease, step))).groups

    async def nack(self, lease: Lease, reason: str, blamed: tuple[str, ...] = ()) -> int:
        return (await self.send(protocol.nack(self.caller, lease, reason, blamed))).dead

    async def release(self, lease: Lease) -> None:
        await self.send(protocol.release(self.caller, lease))

    async def annotate(self, lease: Lease, calls: Sequence[CallAnnotation], *, version: int) -> int:
        requests = protocol.annotate(self.caller, lease, version, calls)
        return sum([(await self.send(request)).added for request in requests])

    async def rewind(self, step: int, versions: Mapping[str, int], *, take_over: bool = False) -> Rewound:
        restored = Rewind(step, dict(versions), self.run, take_over)
        rewound = await self.send(protocol.rewind(self.caller["trainer"], restored))
        self.caller["incarnation"] = rewound.incarnation
        return rewound

    async def policy(self, name: str) -> PolicyStatus:
        return await self.send(protocol.policy(name))

    async def begin_update(self, policy: str, mode: PauseMode = "keep") -> None:
        await self.send(protocol.begin_update(self.caller, policy, mode))

    async def push(self, policy: str, path: str, version: int, *, digest: str, adapter: bool = False) -> None:
        await self.send(protocol.push(policy, PushWeights(path, version, digest, adapter, **self.caller)))

    async def set_control(self, policy: str, control: RolloutControl) -> None:
        await self.send(protocol.set_control(self.caller, policy, control))

    async def score(self, policy: str, sequences: Sequence[ScoredIds], *, top_logprobs: int = 0) -> PolicyScores:
        return await self.send(protocol.score(policy, ScoreIds(tuple(sequences), top_logprobs)))

    async def ranks(self, policy: str) -> int:
        return (await self.send(protocol.ranks(policy))).ranks

    async def receive(self, policy: str, transfer: Transfer) -> None:
        await self.send(protocol.receive(policy, transfer))

    async def finish_update(self, policy: str) -> None:
        await self.send(protocol.finish_update(self.caller, policy))

    async def leave(self, policy: str) -> None:
        await self.send(protocol.leave(self.caller, policy))
