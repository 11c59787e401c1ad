"""Several policies in one rollout, each in a role: from the submission to what a trainer leases."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rolltap.contract.admin import GroupRule, SubmitTasks
from rolltap.contract.control import RolloutControl
from rolltap.contract.tags import temperature_of
from rolltap.contract.trainer import Lease, LeaseRequest
from rolltap.datasets.record import ReadOptions, chosen_groups, recorded_groups
from rolltap.engine.scripted import Script, ScriptedEngine, ScriptedReply
from rolltap.engine.tiny import FOLDER
from rolltap.errors import InvalidRequest, TaskInvalid
from rolltap.harnesses.client import AdminClient, ClaimedRollout
from rolltap.harnesses.runner.node import NodeAgent, NodeSettings
from rolltap.harnesses.runner.specs import Defaults, check
from rolltap.proxy.app import Rolltap
from rolltap.reconstructor.exporters.dataset import Grouping
from rolltap.reconstructor.rules import session_rules
from rolltap.settings import load_settings
from rolltap.types import GroupStatus, Task
from rolltap.wire import pack, unpack

from ..harnesses.house import POLICY, house_settings, serving

ROLES = {"referee": "frozen", "solver": POLICY, "critic": POLICY}
TWO_TRAINED = {"referee": "frozen", "solver": POLICY, "critic": "other"}
DEBATE = """
import json, os, urllib.request as u
def ask(model, text):
    body = {"model": model, "messages": [{"role": "system", "content": model}, {"role": "user", "content": text}]}
    headers = {"Authorization": "Bearer " + os.environ["ROLLTAP_KEY"], "Content-Type": "application/json"}
    url = os.environ["ROLLTAP_BASE_URL"] + "/v1/"
    if text:
        return json.load(u.urlopen(u.Request(url + "chat/completions", json.dumps(body).encode(), headers)))
    return [model["id"] for model in json.load(u.urlopen(u.Request(url + "models", headers=headers)))["data"]]
assert os.environ["ROLLTAP_ROLES"] == "referee solver critic", os.environ["ROLLTAP_ROLES"]
assert os.environ["ROLLTAP_MODEL"] == "solver"
assert os.environ["ROLLTAP_CONTEXT"] == "1048576"
assert os.environ["ROLLTAP_ROLE_CONTEXTS"] == "3000 1048576 1048576"
assert ask("", "") == ["referee", "solver", "critic", "tiny", "frozen"]
for role in ("referee", "solver", "critic"):
    assert ask(role, "begin")["model"] == role
"""

CHECK = Path(__file__).with_name("role_checks.py")


@pytest.fixture
async def home(tmp_path: Path) -> AsyncIterator[tuple[Rolltap, AdminClient]]:
    async with ScriptedEngine(Script(otherwise=ScriptedReply(say="Hello.")), FOLDER) as engine:
        asked: dict[str, Any] = dict(house_settings(tmp_path, engine.url))
        tiny = asked["policies"][POLICY]
        asked["policies"] = {POLICY: tiny, "frozen": {**tiny, "trainable": False, "max_context": 3000}}
        asked["policies"] |= {"other": {**tiny, "model": "second"}, "twin": {**tiny, "model": "second"}}
        settings = load_settings(None, **asked)
        async with (
            Rolltap.running(settings, check_task=check) as app,
            serving(app, settings) as urls,
            AdminClient(urls["admin"], app.settings.keys.admin) as client,
        ):
            yield app, client


def debate(evaluator: dict[str, str] | None = None) -> Task:
    scored = evaluator or {"kind": "python", "callable": f"{CHECK}:by_role"}
    return Task("debate", "", {"harness": "command", "argv": [sys.executable, "-c", DEBATE], "evaluator": scored})


READ = ReadOptions("tree", session_rules, lambda session: (), Grouping())


def fail(session_id: str, error: Exception) -> None:
    raise error


async def test_each_role_is_played_recorded_and_rewarded_under_its_name(
    home: tuple[Rolltap, AdminClient], tmp_path: Path
) -> None:
    app, client = home
    work = SubmitTasks(ROLES, 2, [debate()], rule=GroupRule(scopes=("rollout", "role:solver")), id="s")
    told = await client.submit(work)
    assert (told.policy, told.roles) == (POLICY, ROLES)
    assert await client.submit(work) == told
    node = NodeAgent(
        client, NodeSettings("n", wait=0.1), Defaults(runtime="process", workspaces=tmp_path / "workspaces")
    )
    await node.run(asyncio.Event(), until_idle=True)
    (group,) = await client.submission_groups("s")
    assert group.status == "complete", group
    assert group.roles == ROLES
    rewards = [(one.scope, one.value) for one in group.rollouts[0].rewards]
    assert sorted(rewards) == [("role:critic", 0.75), ("role:solver", 0.25), ("rollout", 1.0)]
    session_id = group.rollouts[0].session_id
    assert session_id is not None
    rows = await app.call_log.rows(session_id)
    assert [(row.intent.policy, row.intent.agent, row.intent.kind) for row in rows] == [
        ("frozen", "referee", "auxiliary"),
        (POLICY, "", "main"),
        (POLICY, "critic", "main"),
    ]
    given = await app.ledger.trainers.lease(LeaseRequest("t", POLICY, 1))
    (leased,) = unpack(pack(given), Lease).groups  # as a trainer gets it
    assert (leased.group.status, leased.group.roles) == (GroupStatus.LEASED, ROLES)
    segments = {one.agent: one.loss_mask.any() for one in leased.rollouts[0].trajectory.segments}
    assert segments == {"referee": False, "": True, "critic": True}


async def test_two_policies_are_trained_in_the_same_rollouts(home: tuple[Rolltap, AdminClient], tmp_path: Path) -> None:
    app, client = home
    await client.submit(SubmitTasks(TWO_TRAINED, 2, [debate()], id="s"))
    node = NodeAgent(
        client, NodeSettings("n", wait=0.1), Defaults(runtime="process", workspaces=tmp_path / "workspaces")
    )
    await node.run(asyncio.Event(), until_idle=True)
    told = await client.get("/tasks/s")
    assert (told["policy"], told["also"], told["groups"]) == (POLICY, ["other"], {"complete": 1})
    (group,) = await client.submission_groups("s")
    assert list(group.trains) == [POLICY, "other"]
    trained, rewards = {}, {}
    for policy in (POLICY, "other"):
        (leased,) = (await app.ledger.trainers.lease(LeaseRequest(policy, policy, 1))).groups
        assert leased.group.id == group.trains[policy]
        segments = leased.rollouts[0].trajectory.segments
        trained[policy] = {segment.agent for segment in segments if segment.loss_mask.any()}
        assert {segment.agent for segment in segments} == {"referee", "", "critic"}
        rewards[policy] = leased.rollouts[0].reward
    assert trained == {POLICY: {""}, "other": {"critic"}}
    assert rewards == {POLICY: 0.25, "other": 0.75}
    for policy in (POLICY, "other"):
        state = await client.get(f"/policies/{policy}")
        assert (state["groups"], state["rollouts"]) == ({"leased": 1}, {"succeeded": 2})
    for policy in (POLICY, "other"):
        shown = await client.get(f"/read/groups/{group.trains[policy]}")
        assert (shown["line"]["trains"], shown["line"]["rewards"]) == (group.trains, [rewards[policy]] * 2)
        assert [one["reward"] for one in shown["rollouts"]] == [rewards[policy]] * 2
    chosen = chosen_groups(app.call_log, READ, [rollout.session_id or "" for rollout in group.rollouts], fail)
    for read in (recorded_groups(app.call_log, READ, fail), chosen):
        exported = [item async for items in read for item in items]
        assert [item.session.policy for item in exported] == [POLICY, POLICY, "other", "other"]
        assert [item.reward for item in exported] == [0.25, 0.25, 0.75, 0.75]
        segments = [segment for item in exported for segment in item.trajectory.segments]
        assert [segment.agent for segment in segments if segment.loss_mask.any()] == ["", "", "critic", "critic"]
        assert [item.group_id for item in exported] == [id for id in group.trains.values() for _ in range(2)]


@pytest.mark.parametrize(
    ("check_name", "roles", "scopes", "rewards"),
    [
        ("of_roles_only", TWO_TRAINED, ("rollout",), {POLICY: 0.25, "other": 0.75}),
        ("of_critic_only", TWO_TRAINED, ("rollout",), None),
        ("of_roles_only", ROLES, ("rollout",), None),
        ("of_critic_only", ROLES, ("role:critic",), {POLICY: None}),
    ],
    ids=["each policy", "one policy of two", "one policy", "a rule that says so"],
)
async def test_a_check_that_scores_roles_only_leaves_no_group_open(
    home: tuple[Rolltap, AdminClient],
    tmp_path: Path,
    check_name: str,
    roles: dict[str, str],
    scopes: tuple[str, ...],
    rewards: dict[str, float | None] | None,
) -> None:
    app, client = home
    task = debate({"kind": "python", "callable": f"{CHECK}:{check_name}"})
    await client.submit(SubmitTasks(roles, 1, [task], rule=GroupRule(scopes=scopes), id="s"))
    settings, defaults = NodeSettings("n", wait=0.1), Defaults(runtime="process", workspaces=tmp_path / "workspaces")
    await NodeAgent(client, settings, defaults).run(asyncio.Event(), until_idle=True)
    (group,) = await client.submission_groups("s")
    (rollout,) = group.rollouts
    if rewards is None:
        assert (group.status, rollout.status, rollout.cause) == ("dropped", "failed", "evaluation")
        assert "no reward of scope rollout" in rollout.reason
        return
    assert (group.status, rollout.status) == ("complete", "succeeded")
    for policy, reward in rewards.items():
        (leased,) = (await app.ledger.trainers.lease(LeaseRequest(policy, policy, 1))).groups
        assert leased.rollouts[0].reward == reward


async def test_a_control_of_each_trained_policy_holds_in_shared_rollouts(home: tuple[Rolltap, AdminClient]) -> None:
    app, client = home
    await app.ledger.controls.set(POLICY, RolloutControl(max_turns=5))
    await app.ledger.controls.set("other", RolloutControl(max_turns=3, temperature=0.5))
    group = await client.open_group(debate(), policy=TWO_TRAINED, n=1)
    started = await client.start_rollout(ClaimedRollout(group.rollout_ids[0]), ttl=60)
    session = await app.call_log.session(started.session_id)
    assert session is not None
    assert started.turns == 3
    assert (temperature_of(session, POLICY), temperature_of(session, "other")) == (None, 0.5)


async def test_the_context_is_the_settings_or_else_the_engines(home: tuple[Rolltap, AdminClient]) -> None:
    _, client = home
    contexts = {POLICY: 1 << 20, "frozen": 3000, "other": 1 << 20, "twin": 1 << 20}
    assert {row["name"]: row["context"] for row in (await client.get("/policies"))["policies"]} == contexts
    for policy, context in contexts.items():
        assert (await client.open_session(policy=policy)).endpoint.context == context


async def test_a_cast_that_cannot_play_is_refused_when_it_is_submitted(home: tuple[Rolltap, AdminClient]) -> None:
    _, client = home
    for policy, told in (
        ({"solver": "tiny", "judge": "gone"}, "'judge': no policy 'gone'; served: tiny, frozen, other, twin"),
        ({"solver": "other", "critic": "twin"}, r"one's weights would replace the other's.*policies\.twin\.model"),
        ({"a b": "tiny"}, "invalid role name"),
        ({}, "1 to 16 roles"),
    ):
        for ask in (client.submit(SubmitTasks(policy, 1, [debate()])), client.open_group(debate(), policy=policy, n=1)):
            with pytest.raises(InvalidRequest, match=told):
                await ask
    with pytest.raises(InvalidRequest, match="no role for 'role:poet'"):
        await client.submit(SubmitTasks(ROLES, 1, [debate()], rule=GroupRule(scopes=("role:poet",))))
    with pytest.raises(TaskInvalid, match="no policy 'gone'; known: frozen, other, tiny, twin"):
        await client.submit(SubmitTasks(POLICY, 1, [debate({"kind": "llm_judge", "policy": "gone"})]))
    assert (await client.get("/tasks"))["submissions"] == []


async def test_a_role_is_of_its_own_rollout_only(home: tuple[Rolltap, AdminClient]) -> None:
    _, client = home
    session = await client.open_session(policy=POLICY)
    body = {"model": "solver", "messages": [{"role": "user", "content": "hi"}]}
    headers = {"Authorization": f"Bearer {session.endpoint.key}"}
    async with (
        aiohttp.ClientSession(headers=headers) as http,
        http.post(f"{session.endpoint.v1}/chat/completions", json=body) as reply,
    ):
        assert reply.status == 404, await reply.text()
