"""OpenEnv's loop-owning sessions from the record: what TRL's `HarnessRolloutWorker` trains, without its proxy.

A factory's sessions are the rollouts of leased groups: TRL's seed, one for all generations of a prompt, chooses the
group, and each session is the next of its rollouts. `fetch_training_trace` gives a turn for each run of trained tokens,
with what precedes it as its prompt, so each token is trained once, in its own context.

TRL's worker doesn't tell which rollouts a step was made of. A group is acknowledged when its last session is closed,
and is lost with a trainer that is killed behind that: for exactly once take `trl_async`.
"""

# pyright: reportMissingImports=false
# The package is in the environments of its users only.

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

from rolltap.contract.leases import RolloutRecord
from rolltap.contract.trainer import LeaseOptions
from rolltap.errors import ConfigError
from rolltap.trainer_client.adapters import ADAPTERS
from rolltap.trainer_client.adapters.feed import check_tokenizer
from rolltap.trainer_client.adapters.rows import rows_of
from rolltap.trainer_client.client import TrainerClient
from rolltap.trainer_client.find_recipe import make_recipe
from rolltap.trainer_client.leases import LeaseHolder
from rolltap.trainer_client.scoring import baseline, check

ADAPTERS["openenv"].check_installed()
from openenv.core.harness import ResourceSession, ResourceSessionFactory, TrainingTrace, VerifyResult  # noqa: E402

from rolltap.trainer_client.adapters.openenv_traces import trace_of  # noqa: E402


class PlayedSession(ResourceSession):
    """A rollout that was played: there is nothing to wait for."""

    def __init__(self, record: RolloutRecord, factory: LeasedSessionFactory, seed: int) -> None:
        self._record, self._factory, self._seed = record, factory, seed

    def wait_for_completion(self, timeout_s: float | None = None) -> int:
        return 0

    def fetch_training_trace(self) -> TrainingTrace:
        return trace_of(self._record)

    def verify(self, transcript: Any, final_state: Any = None) -> VerifyResult:
        """The record's reward; None leaves the rollout out of the baseline."""
        return VerifyResult(env_reward=self._record.reward, done=True)

    def close(self) -> None:
        self._factory.closed(self._seed)

    def initial_messages(self) -> list[Any]:
        return []

    def list_tools(self) -> list[Any]:
        return []

    def call_tool(self, name: str, arguments: dict[str, Any]) -> Any:
        raise ConfigError("the rollout was played by its own harness: take HarnessRolloutWorker without an adapter")


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """What sessions are made of: `generations` is TRL's `num_generations`, `vocabulary` and `tokenizer` the model's."""

    policy: str
    generations: int
    vocabulary: int
    tokenizer: Any
    max_staleness: int | None = 1
    lease_ttl: float = 600.0
    wait: float = 5.0


@dataclass(slots=True)
class _SeedGroup:
    """The group of one seed: rollouts not handed out yet, and how many sessions are still to be closed."""

    holder: LeaseHolder
    waiting: list[RolloutRecord]
    unclosed: int


class LeasedSessionFactory(ResourceSessionFactory[PlayedSession]):
    """Sessions of leased groups: `functools.partial(LeasedSessionFactory, url, key, settings, run)` is the worker's
    `harness_session_factory`. TRL calls it with the `sampling` that its trainer computes with."""

    def __init__(
        self, url: str, key: str, settings: SessionSettings, run: str, *, sampling: dict[str, Any] | None = None
    ) -> None:
        self._client = TrainerClient(url, key, "openenv", run=run)
        self._settings = settings
        self._temperature = float((sampling or {}).get("temperature", 1.0))
        self._groups: dict[int, _SeedGroup] = {}
        self._lock = threading.Lock()
        check_tokenizer(self._client, settings.policy, settings.tokenizer)
        served = self._client.policy(settings.policy)
        self._client.rewind(int(time.time()), {settings.policy: served.version})  # steps are seconds: TRL tells none

    def create(self, task: Any, seed: int | None = None, episode_id: str | None = None) -> PlayedSession:
        """The next rollout of the seed's group; `ConfigError` when it has no more, which TRL counts as unscorable."""
        if seed is None:
            raise ConfigError("sessions need a seed: it says which generations are of one group")
        with self._lock:
            group = self._groups.get(seed) or self._groups.setdefault(seed, self._leased())
            if not group.waiting:
                raise ConfigError("the group has no more rollouts than were handed out")
            return PlayedSession(group.waiting.pop(0), self, seed)

    def closed(self, seed: int) -> None:
        """With its last session the group is acknowledged."""
        with self._lock:
            group = self._groups[seed]
            group.unclosed -= 1
            if group.unclosed == 0:
                group.holder.acknowledge(int(time.time()))
                group.holder.clear()
                group.holder.__exit__()
                del self._groups[seed]

    def _leased(self) -> _SeedGroup:
        chosen = self._settings
        options = LeaseOptions(max_staleness=chosen.max_staleness, wait=chosen.wait, ttl=chosen.lease_ttl)
        sound = partial(check, vocabulary=chosen.vocabulary)
        holder = LeaseHolder(self._client, chosen.policy, options, keep_zero_variance=True, check=sound).__enter__()
        while True:
            holder.gather(1, lambda: False)
            (group,) = holder.groups
            rollouts = baseline(group)
            if len(rollouts) > chosen.generations:
                holder.refuse(f"{len(rollouts)} rollouts do not fit in {chosen.generations} generations")
            elif rows_of([group], make_recipe("dr_grpo", {}), self._temperature):
                return _SeedGroup(holder, rollouts, len(rollouts))
            else:
                holder.refuse("no rollout of this group has a trained token")
