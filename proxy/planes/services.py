"""The parts of the server that the routes of the trainer and admin planes use."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from rolltap.calllog.processes import PeersCheck
from rolltap.calllog.sql import SqlCallLog
from rolltap.contract.admin import PolicyOrRoles
from rolltap.contract.keys import Caller
from rolltap.ledger.ledger import Ledger
from rolltap.protocols.handles import Handles
from rolltap.proxy.call.policies import Policies
from rolltap.proxy.call.recorder import Recorder
from rolltap.proxy.front.access import CountTampering, uncounted_acts
from rolltap.proxy.reading_process.questions import AskRecord
from rolltap.proxy.sessions.service import SessionService
from rolltap.settings import Settings
from rolltap.types import Task


@dataclass(frozen=True, slots=True)
class Cast:
    """Who plays in a rollout: `policy` and the ones that are `also` trained, and the policy of each role."""

    policy: str
    roles: Mapping[str, str] = field(default_factory=dict)
    also: tuple[str, ...] = ()


def fields_of(value: Any) -> dict[str, Any]:
    """The fields of a dataclass by name, as they are."""
    return {item.name: getattr(value, item.name) for item in fields(value)}


CheckTask = Callable[[Task, Collection[str]], None]


@dataclass(eq=False)
class Services:
    """`ask` answers questions about the record; `base_url` is the agent plane as harnesses reach it.

    `check_task` raises `TaskInvalid` for a task that no node could run where these policies are served: the proxy
    doesn't know the harnesses itself.
    """

    ledger: Ledger
    call_log: SqlCallLog
    peers: PeersCheck
    settings: Settings
    sessions: SessionService
    policies: Policies
    recorder: Recorder
    handles: Handles
    ask: AskRecord
    check_task: CheckTask = lambda task, policies: None
    base_url: str = ""
    stopping: bool = False  # no load balancer should send new calls
    count_tampering: CountTampering = uncounted_acts

    def resolve_roles(self, policy: PolicyOrRoles) -> Cast:
        """The policies that are trained, and the policy of each role (empty where one policy plays alone)."""
        if isinstance(policy, str):
            return Cast(policy)
        first, *also = self.policies.trained(policy)
        return Cast(first, policy, tuple(also))

    def session_url(self, session_id: str) -> str:
        """The base URL of one session, for harnesses that can't carry a key everywhere."""
        return f"{self.base_url}/s/{session_id}"


@dataclass(frozen=True)
class Routes:
    """A section of a plane for one caller: made for every request."""

    by: Caller
    services: Services
