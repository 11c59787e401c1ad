"""Both clients against one plane: the same calls, the same answers, the server's own errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from rolltap.contract.control import RolloutControl
from rolltap.contract.trainer import Lease, LeaseOptions, Replay, Rewound
from rolltap.errors import (
    BY_CODE,
    ConfigError,
    InvalidRequest,
    LeaseLost,
    RewindOvertaken,
    RolltapError,
    ServerUnreachable,
    StepRegression,
    StoreUnavailable,
    TrainerFenced,
    Unauthenticated,
    UnknownPolicy,
)
from rolltap.http_client import error_of
from rolltap.trainer_client.lease.client import AsyncTrainerClient, TrainerClient

from .making import random_group
from .plane import KEY, Plane, running

Call = Callable[..., Any]


@pytest.fixture(params=["blocking", "asynchronous"])
def call(request: pytest.FixtureRequest, plane: Plane) -> Iterator[Call]:
    """`call("ack", lease, 3)` on either client; `key` and `url` stand for the plane's own."""
    with running(plane) as address:

        def blocking(name: str, *given: Any, url: str = address, key: str = KEY, **named: Any) -> Any:
            client = TrainerClient(url, key, "trainer", run="run", patience=0.5)
            client.caller["incarnation"] = plane.incarnation
            return getattr(client, name)(*given, **named)

        def asynchronous(name: str, *given: Any, url: str = address, key: str = KEY, **named: Any) -> Any:
            async def send() -> Any:
                async with AsyncTrainerClient(url, key, "trainer", run="run", patience=0.5) as client:
                    client.caller["incarnation"] = plane.incarnation
                    return await getattr(client, name)(*given, **named)

            return asyncio.run(send())

        yield blocking if request.param == "blocking" else asynchronous


def lease_of(call: Call, plane: Plane, groups: int = 1, **options: Any) -> Lease:
    plane.offer(*(random_group(f"g{index}", [1.0, 0.0], seed=index) for index in range(groups)))
    lease = call("lease", "policy", groups=groups, options=LeaseOptions(wait=2, **options))
    assert lease is not None
    return lease


def test_a_lease_brings_whole_groups_array_for_array(call: Call, plane: Plane) -> None:
    lease = lease_of(call, plane, 2, max_staleness=3, at_least=2, ttl=60, batch=2)
    assert [group.group.id for group in lease.groups] == ["g0", "g1"]
    sent = random_group("g1", [1.0, 0.0], seed=1).rollouts[1].trajectory.segments[0]
    got = lease.groups[1].rollouts[1].trajectory.segments[0]
    assert np.array_equal(sent.token_ids, got.token_ids)
    assert np.array_equal(sent.logprobs, got.logprobs)
    assert plane.calls[-1][1] == {
        "trainer": "trainer", "policy": "policy", "groups": 2, "max_staleness": 3, "stale": "drop", "wait": 2,
        "at_least": 2, "ttl": 60, "batch": 2, "incarnation": 0, "tampered": "keep",
    }  # fmt: skip


def test_nothing_ready_is_none(call: Call) -> None:
    assert call("lease", "policy", groups=1, options=LeaseOptions(wait=0)) is None


def test_replay_is_asked_for_by_its_filter(call: Call, plane: Plane) -> None:
    call("ack", lease_of(call, plane), 1)
    again = call("lease", "policy", groups=1, options=LeaseOptions(wait=2, replay=Replay(min_age=2, tags=("hard",))))
    assert [group.group.id for group in again.groups] == ["g0"]
    assert plane.calls[-1][1]["replay"] == {
        "min_age": 2, "max_age": None, "min_reward": None, "max_reward": None, "tags": ["hard"], "order": "newest",
    }  # fmt: skip


def test_a_lease_is_extended_acknowledged_and_rewound(call: Call, plane: Plane) -> None:
    lease = lease_of(call, plane)
    assert call("extend", lease, ttl=30) == 30
    assert call("ack", lease, 3) == 1
    assert call("ack", lease, 3) == 1
    assert plane.acked == {"g0": 3}
    assert call("rewind", 2, {"policy": 0}) == Rewound(1, 0, {"policy": 0}, incarnation=1, last_step=3)
    assert plane.acked == {}


def test_a_lease_is_refused_or_released(call: Call, plane: Plane) -> None:
    assert call("nack", lease_of(call, plane, 2), "NaN", ("g1",)) == 0
    assert plane.refused == [("NaN", ("g1",))]
    call("release", lease_of(call, plane))
    assert {group.group.id for group in plane.ready} == {"g0"}


def test_a_control_is_set(call: Call, plane: Plane) -> None:
    call("set_control", "policy", RolloutControl(max_turns=7, temperature=0.5, curriculum={"easy": 2.0}))
    assert plane.controls == [{"max_turns": 7, "temperature": 0.5, "curriculum": {"easy": 2.0}}]


def test_weights_go_through_begin_push_finish(call: Call, plane: Plane) -> None:
    call("begin_update", "policy", "drain")
    call("push", "policy", "/weights/step-1", 1, digest="digest")
    call("finish_update", "policy")
    assert plane.names() == ["begin_update", "push", "finish_update"]
    policy = call("policy", "policy")
    assert (policy.name, policy.version, policy.paused) == ("policy", 1, None)


@pytest.mark.parametrize(
    ("refused", "error", "message"),
    [
        (lambda call, lease: call("policy", "other"), UnknownPolicy, "no policy 'other'; known: policy"),
        (lambda call, lease: call("ack", foreign(lease), 1), LeaseLost, "somebody else's"),
        (lambda call, lease: call("extend", foreign(lease), 1), LeaseLost, "somebody else's"),
        (lambda call, lease: call("policy", "policy", key="wrong"), Unauthenticated, "not a trainer key"),
    ],
)
def test_errors_are_the_servers_own(
    call: Call, plane: Plane, refused: Callable[[Call, Lease], Any], error: type[RolltapError], message: str
) -> None:
    lease = lease_of(call, plane)
    with pytest.raises(error, match=message):
        refused(call, lease)
    assert plane.acked == {}


def foreign(lease: Lease) -> Lease:
    return Lease(lease.id, lease.trainer, lease.policy, lease.token + 1, 1.0, 0, ())


def test_an_acknowledged_step_never_goes_backwards(call: Call, plane: Plane) -> None:
    first, second = lease_of(call, plane), lease_of(call, plane)
    call("ack", first, 5)
    with pytest.raises(StepRegression) as caught:
        call("ack", second, 4)
    assert caught.value.param == "step"


def test_a_dropped_connection_is_tried_again(call: Call, plane: Plane) -> None:
    plane.fail_next = 1
    assert call("policy", "policy").version == 0


def test_no_server_is_said_so_at_once_and_after_a_while(call: Call, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ServerUnreachable, match=r"no rolltap server at http://127\.0\.0\.1:9 .*rolltap serve"):
        call("policy", "policy", url="http://127.0.0.1:9")
    (said,) = [record.getMessage() for record in caplog.records if record.name == "rolltap.http_client"]
    assert said.startswith("no rolltap server at http://127.0.0.1:9 (")
    assert said.endswith("; trying for 0.5 s")


def test_names_cannot_break_out_of_the_path(call: Call, plane: Plane) -> None:
    with pytest.raises(UnknownPolicy):
        call("policy", "../trainers?x=1")


FOREIGN = [b"", b"<html><h1>Bad Gateway</h1></html>", b'{"error": "no"}', b"[]", b'{"error": {"code": 3}}', b"\xff"]


@pytest.mark.parametrize("body", FOREIGN)
@pytest.mark.parametrize("status", [404, 413, 429, 500, 502, 503, 504, 599])
def test_an_error_without_our_body_is_no_answer_of_a_server(status: int, body: bytes) -> None:
    error = error_of(status, body, "3", "http://proxy")
    assert (type(error), error.retry_after) == (ServerUnreachable, 3.0)
    assert f"http://proxy answered {status} (" in error.message
    assert "html" not in error.message


@pytest.mark.parametrize("answer", [(502, FOREIGN[1]), (503, b""), (504, b"upstream timed out"), (404, b"no backend")])
def test_a_balancer_that_reaches_no_server_is_asked_again(call: Call, plane: Plane, answer: tuple[int, bytes]) -> None:
    lease = lease_of(call, plane)
    plane.balancer = [answer]
    assert call("ack", lease, 3) == 1
    assert (plane.acked, plane.balancer) == ({"g0": 3}, [])
    plane.balancer = [answer] * 99
    with pytest.raises(ServerUnreachable, match=f"answered {answer[0]} .* a balancer doesn't reach one"):
        call("policy", "policy")


def test_an_unknown_error_code_keeps_its_message() -> None:
    error = error_of(400, b'{"error": {"code": "new_one", "message": "as it is"}}')
    assert (type(error), error.message) == (RolltapError, "as it is")
    known = error_of(400, b'{"error": {"code": "invalid_request", "message": "no", "param": "groups"}}')
    assert (type(known), known.param) == (InvalidRequest, "groups")


@pytest.mark.parametrize("code", sorted(BY_CODE))
def test_every_error_of_the_server_arrives_as_its_own_kind(code: str) -> None:
    body = json.dumps({"error": {"code": code, "message": "why", "param": "field"}}).encode()
    error = error_of(500, body)
    assert (type(error), error.message, error.param) == (BY_CODE[code], "why", "field")


def test_every_call_carries_the_incarnation_of_the_last_rewind(plane: Plane) -> None:
    with running(plane) as url:
        first, second = (TrainerClient(url, KEY, "trainer", run="run", patience=0.5) for _ in range(2))
        first.rewind(0, {"policy": 0})
        plane.offer(random_group("g0", [1.0, 0.0], seed=0))
        lease = first.lease("policy", groups=1, options=LeaseOptions(wait=0))
        assert lease is not None
        second.rewind(0, {"policy": 0}, take_over=True)
        rewind = {"step": 0, "versions": {"policy": 0}, "run": "run", "take_over": True, "after": 1}
        assert plane.calls[-1][1] == rewind
        for refused in (
            lambda: first.lease("policy", groups=1),
            lambda: first.extend(lease),
            lambda: first.ack(lease, 1),
            lambda: first.nack(lease, "NaN"),
            lambda: first.release(lease),
            lambda: first.begin_update("policy"),
            lambda: first.push("policy", "/weights", 1, digest="digest"),
            lambda: first.finish_update("policy"),
        ):
            with pytest.raises(TrainerFenced):
                refused()
        second.begin_update("policy")
        second.finish_update("policy")


def test_a_rewind_behind_another_one_reads_the_incarnation_again(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    """One try of this client was carried out, and its reply was lost."""
    served = Plane.serve
    unheard = ["first", "second"]

    def serve(plane: Plane, method: str, path: str, body: dict[str, Any]) -> bytes:
        if path.endswith("/rewind") and body["after"] != plane.incarnation:
            raise RewindOvertaken("another one came before")
        reply = served(plane, method, path, body)
        if path.endswith("/rewind") and unheard:
            raise StoreUnavailable(unheard.pop())
        return reply

    monkeypatch.setattr(Plane, "serve", serve)
    with running(plane) as url:
        client = TrainerClient(url, KEY, "trainer", run="run", patience=5)
        assert client.rewind(0, {"policy": 0}).incarnation == plane.incarnation == 3
        client.begin_update("policy")


def test_a_client_without_a_run_is_a_run_of_its_own() -> None:
    assert TrainerClient("http://x", KEY, "trainer").run != TrainerClient("http://x", KEY, "trainer").run


@pytest.mark.parametrize("kind", [TrainerClient, AsyncTrainerClient])
def test_what_is_no_url_is_refused_at_once(kind: type[TrainerClient | AsyncTrainerClient]):
    with pytest.raises(ConfigError, match=r"write http://127\.0\.0\.1:8711"):
        kind("127.0.0.1:8711", KEY, "t")
