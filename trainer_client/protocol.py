"""The trainer plane's requests and replies, without any input or output.

A `Request` says what to send and how its reply reads, so the blocking and the asynchronous client share everything but
the socket. Errors are the server's own, by their code (docs/architecture.md, "HTTP API").
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Generic, Literal, TypeVar
from urllib.parse import quote

from rolltap import errors, wire
from rolltap.errors import RolltapError
from rolltap.types import Lease

T = TypeVar("T")

PauseMode = Literal["keep", "drain", "abort"]
"""What becomes of calls in flight while weights are loaded: they wait and go on, finish first, or are cut short."""

FIRST_RETRY_S, LONGEST_RETRY_S = 0.2, 3.0
"""The pause before the first repetition of a request that found no server, and the longest one."""

ERRORS: Mapping[str, type[RolltapError]] = {
    kind.code: kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, RolltapError)
}


@dataclass(frozen=True, slots=True)
class Request(Generic[T]):
    """What to send, and how to read the reply. It may be sent twice (see `TrainerClient`), unless it is for `once`.

    `wait` is how many seconds the server may take by intention, beyond the client's own time limit.
    """

    method: str
    path: str
    parse: Callable[[bytes], T]
    body: Mapping[str, Any] | None = None
    wait: float = 0.0
    once: bool = False

    @property
    def content(self) -> bytes | None:
        return None if self.body is None else json.dumps(self.body).encode()


@dataclass(frozen=True, slots=True)
class PolicyInfo:
    """A policy as the server sees it. `paused` is the mode of the weight update under way."""

    name: str
    version: int
    tokenizer_hash: str
    paused: str | None = None


@dataclass(frozen=True, slots=True)
class Rewound:
    """How many groups a rewind brought back: acknowledged after the step, and in the trainer's open leases.

    `versions` are the numbers, by policy, under which the restored weights are to be served.
    """

    acknowledged: int
    leased: int
    versions: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors that an engine receives and then loads together: names, torch's names of their dtypes, shapes."""

    names: Sequence[str]
    dtypes: Sequence[str]
    shapes: Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Weights that the trainer sends as rank 0 of a process group (`rolltap.weight_group`), in the buckets' order.

    `world_size` is 1 more than `ranks` said; `timeout_s` how long any rank waits for the others.
    """

    address: str
    port: int
    group: str
    world_size: int
    backend: str
    timeout_s: float
    buckets: Sequence[Bucket]


@dataclass(frozen=True, slots=True)
class Replay:
    """Which acknowledged groups to lease again: age in versions, mean reward, tags (all of them)."""

    min_age: int = 0
    max_age: int | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    tags: tuple[str, ...] = ()
    order: Literal["newest", "random"] = "newest"


@dataclass(frozen=True, slots=True)
class LeaseOptions:
    """How a lease is taken.

    `max_staleness` counts weight versions behind the policy (None: of any age); staler groups, and those with tokens of
    weights that a rewind abandoned, are dropped, or kept for others. The server answers as soon as `at_least` groups
    are ready, or after `wait` seconds with what there is. `ttl` seconds later the groups are somebody else's unless
    extended. `batch`, the groups of one step, bounds how many the rollout side may have outstanding. `replay` asks for
    groups that were trained before.
    """

    max_staleness: int | None = None
    stale: Literal["drop", "keep"] = "drop"
    wait: float = 30.0
    at_least: int = 1
    ttl: float = 600.0
    batch: int | None = None
    replay: Replay | None = field(default=None)


def lease(trainer: str, policy: str, groups: int, options: LeaseOptions) -> Request[Lease | None]:
    body: dict[str, Any] = {
        "trainer": trainer,
        "policy": policy,
        "groups": groups,
        "max_staleness": options.max_staleness,
        "stale": options.stale,
        "wait": options.wait,
        "at_least": min(options.at_least, groups),
        "ttl": options.ttl,
        "batch": options.batch,
    }
    if options.replay is not None:
        body["replay"] = {name: getattr(options.replay, name) for name in Replay.__slots__}
    return Request("POST", "/leases", _lease, body, wait=options.wait)


def extend(held: Lease, ttl: float) -> Request[float]:
    return Request("POST", f"/leases/{held.id}/extend", _number("expires_in"), {"token": held.token, "ttl": ttl})


def ack(held: Lease, step: int) -> Request[int]:
    return Request("POST", f"/leases/{held.id}/ack", _count("groups"), {"token": held.token, "step": step})


def nack(held: Lease, reason: str, blamed: tuple[str, ...]) -> Request[int]:
    body = {"token": held.token, "reason": reason, "blamed": list(blamed)}
    return Request("POST", f"/leases/{held.id}/nack", _count("dead"), body)


def release(held: Lease) -> Request[None]:
    return Request("POST", f"/leases/{held.id}/release", _nothing, {"token": held.token})


def rewind(trainer: str, step: int, versions: Mapping[str, int]) -> Request[Rewound]:
    body = {"step": step, "versions": dict(versions)}
    return Request("POST", f"/trainers/{quote(trainer, safe='')}/rewind", _rewound, body)


def policy(name: str) -> Request[PolicyInfo]:
    return Request("GET", _policy_path(name), _policy)


def begin_update(name: str, mode: PauseMode) -> Request[None]:
    return Request("POST", f"{_policy_path(name)}/begin_update", _nothing, {"mode": mode})


def push(name: str, path: str, version: int, adapter: bool = False) -> Request[None]:
    body = {"path": path, "version": version, "adapter": adapter}
    return Request("POST", f"{_policy_path(name)}/push", _nothing, body)


def ranks(name: str) -> Request[int]:
    return Request("GET", f"{_policy_path(name)}/ranks", _count("ranks"))


def receive(name: str, version: int, broadcast: Broadcast) -> Request[None]:
    body = {"version": version, **asdict(broadcast)}
    return Request("POST", f"{_policy_path(name)}/receive", _nothing, body, wait=broadcast.timeout_s, once=True)


def finish_update(name: str) -> Request[None]:
    return Request("POST", f"{_policy_path(name)}/finish_update", _nothing, {})


def error_of(status: int, body: bytes) -> RolltapError:
    """The error that a reply of `status` stands for."""
    try:
        fields = json.loads(body)["error"]
        code, message, param = fields["code"], fields["message"], fields.get("param")
    except (ValueError, KeyError, TypeError, AttributeError):
        return RolltapError(f"the server answered {status}: {body[:200].decode(errors='replace')!r}")
    return ERRORS.get(code, RolltapError)(message, param=param)


def _policy_path(name: str) -> str:
    return f"/policies/{quote(name, safe='')}"


def _lease(body: bytes) -> Lease | None:
    return wire.unpack(body, Lease) if body else None


def _policy(body: bytes) -> PolicyInfo:
    found = json.loads(body)
    return PolicyInfo(found["name"], found["version"], found["tokenizer_hash"], found.get("paused"))


def _rewound(body: bytes) -> Rewound:
    found = json.loads(body)
    return Rewound(found["acknowledged"], found["leased"], found["versions"])


def _nothing(_: bytes) -> None:
    return None


def _number(name: str) -> Callable[[bytes], float]:
    return lambda body: float(json.loads(body)[name])


def _count(name: str) -> Callable[[bytes], int]:
    return lambda body: int(json.loads(body)[name])
