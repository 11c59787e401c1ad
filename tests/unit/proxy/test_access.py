"""Every route of the three planes with every kind of key. The cases come from the planes' own routes."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from fastapi import FastAPI

from rolltap.contract.base import RequestBody
from rolltap.contract.control import RolloutControl
from rolltap.contract.keys import ROLES
from rolltap.contract.trainer import FinishUpdate, Rewind
from rolltap.engine.scripted import say
from rolltap.protocols.base import WireReply
from rolltap.proxy.front import access
from rolltap.types import Task

from ...harnesses.house import POLICY, House, house

KEYLESS = {"GET /health", "GET /ready"}
TABLES = {"admin": access.ADMIN_PLANE, "trainer": access.TRAINER_PLANE}
PLACEHOLDER = re.compile(r"\(\?P<(\w+)>[^)]*\)")

RUNNERS = {
    "POST /sessions",
    "GET /nodes/waiting",
    "POST /nodes/{node}/claim",
    "POST /nodes/{node}/heartbeat",
    "POST /nodes/{node}/release",
    "GET /read/rollouts/{rollout_id}",
    "POST /rollouts/{rollout_id}/start",
    "POST /rollouts/{rollout_id}/fork",
    "POST /rollouts/{rollout_id}/finish",
    "POST /sessions/{session_id}/close",
    "POST /sessions/{session_id}/log",
    "POST /rewards",
}
HIDDEN_FROM_VIEWERS = {"GET /keys", "GET /audit"}


@pytest.fixture
async def home(tmp_path: Path) -> AsyncIterator[House]:
    async with house(say("Hello."), tmp_path) as home:
        yield home


@dataclass
class Wall:
    """The planes, keys of every kind by their names, and what they are of."""

    planes: Mapping[str, Any]
    keys: dict[str, str]
    ids: dict[str, str]

    async def send(self, plane: str, row: str, key: str | None, **more: Any) -> httpx.Response:
        method, path = row.split(" ", 1)
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        transport = httpx.ASGITransport(self.planes[plane])
        more.setdefault("json", {} if method == "POST" else None)
        async with httpx.AsyncClient(transport=transport, base_url="http://proxy", headers=headers) as client:
            return await client.request(method, path, **more)

    async def mint(self, name: str, **body: Any) -> str:
        minted = await self.send("admin", "POST /keys", self.keys["admin"], json={"name": "k", **body})
        assert minted.status_code == 200, minted.text
        self.keys[name], self.ids[name] = minted.json()["key"], minted.json()["id"]
        return self.keys[name]


async def built(home: House) -> Wall:
    roots = home.app.settings.keys
    keys = {"junk": "rt-junk", "forged": "rt-key.admin.forged", "secret of handles": roots.secret}
    keys |= {role: getattr(roots, role) for role in ROLES}
    wall = Wall(home.app.planes, keys, {})
    for role in ROLES:
        await wall.mint(f"minted {role}", role=role)
    await wall.mint("revoked admin", role="admin")
    await wall.send("admin", f"POST /keys/{wall.ids['revoked admin']}/revoke", keys["admin"])
    await wall.mint("expired admin", role="admin", ttl=0.01)
    session = await home.open()
    keys["session"], wall.ids["session"] = session.endpoint.key, session.session_id
    await asyncio.sleep(0.02)
    return wall


@pytest.fixture
async def wall(home: House) -> Wall:
    """Of this test's own."""
    return await built(home)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def wall_of_all(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Wall]:
    """For those that change nothing behind it."""
    async with house(say("Hello."), tmp_path_factory.mktemp("house")) as home:
        yield await built(home)


def rows(app: FastAPI) -> set[str]:
    paths = app.openapi()["paths"].items()
    return {f"{method.upper()} {path}" for path, operations in paths for method in operations}


def may(plane: str, row: str, name: str) -> bool:
    """Whether the key called `name` may call the route: said here once more, in other words than the table's."""
    role = name.removeprefix("minted ")
    reads = row.startswith("GET ")
    match role:
        case "admin":
            return True
        case "trainer":
            return plane == "trainer"
        case "viewer":
            return reads and row not in HIDDEN_FROM_VIEWERS
        case "evaluator":
            return row == "POST /rewards"
        case "runner":
            return plane == "admin" and row in RUNNERS
        case _:
            return False


@pytest.mark.parametrize("plane", TABLES)
async def test_every_route_has_a_rule_and_keeps_to_it_with_every_key(home: House, wall: Wall, plane: str) -> None:
    served = rows(home.app.planes[plane].app)
    assert served - KEYLESS == set(TABLES[plane]), "a route is an operation of its plane"
    for row in sorted(served - KEYLESS):
        assert (await wall.send(plane, row, None)).status_code == 401, row
        for name, key in wall.keys.items():
            if may(plane, row, name) and row.endswith("/events"):
                continue  # an endless stream; its refusals are tried
            status = (await wall.send(plane, row, key)).status_code
            known = name.removeprefix("minted ") in ROLES
            if not may(plane, row, name):
                assert status == (403 if known else 401), (row, name, status)
            elif name.endswith("runner") and ("_id}" in row or row == "POST /sessions"):
                assert status in (400, 403, 404), (row, name, status)  # allowed in, and nothing of that id is its own
            else:
                assert status not in (401, 403), (row, name, status)


@pytest.mark.parametrize("plane", TABLES)
async def test_a_key_is_taken_from_the_bearer_header_only(wall_of_all: Wall, plane: str) -> None:
    for row in sorted(TABLES[plane]):
        for headers in (
            {"x-api-key": wall_of_all.keys["admin"]},
            {"authorization": f"Basic {wall_of_all.keys['admin']}"},
        ):
            answer = await wall_of_all.send(plane, row, None, headers=headers)
            assert answer.status_code == 401, row
        assert (await wall_of_all.send(plane, f"{row}?key={wall_of_all.keys['admin']}", None)).status_code == 401, row


@pytest.mark.parametrize("plane", TABLES)
def test_the_schema_says_that_a_key_is_needed(wall_of_all: Wall, plane: str) -> None:
    schema = wall_of_all.planes[plane].app.openapi()
    assert schema["components"]["securitySchemes"]["HTTPBearer"]["scheme"] == "bearer"
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            assert bool(operation.get("security")) == (f"{method.upper()} {path}" not in KEYLESS), (method, path)


@pytest.mark.parametrize("plane", TABLES)
async def test_a_key_that_was_sent_is_not_asked_for(wall_of_all: Wall, plane: str) -> None:
    row = "/policies/" + POLICY
    for verb in (f"GET {row}", f"POST {row}/control"):  # without a body and with one
        unknown = await wall_of_all.send(plane, verb, "rt-junk")
        assert (unknown.status_code, message(unknown)) == (401, "the key is not known, or it is over")
        misdirected = await wall_of_all.send(plane, verb, "rt-" + "k" * 43)
        assert (misdirected.status_code, "a session's is for the agent plane" in message(misdirected)) == (401, True)
        absent = await wall_of_all.send(plane, verb, None)
        assert (absent.status_code, message(absent)) == (401, "send the plane's key as `Authorization: Bearer KEY`")


def message(reply: httpx.Response) -> str:
    return reply.json()["error"]["message"]


async def test_the_agent_plane_takes_sessions_and_projects_keys_only(home: House, wall: Wall) -> None:
    app = home.app.planes["agent"]
    agent_rows = [
        (f"{method} {path}", target)
        for path, table in [*app._exact.items(), *((pattern.pattern, table) for pattern, table in app._patterns)]
        for method, target in table.items()
        if not isinstance(target, WireReply)
    ]
    assert len(agent_rows) > 10
    for row, _ in agent_rows:
        row = PLACEHOLDER.sub(lambda match: match[1], row).replace("^", "").replace("$", "").replace("\\", "")
        for prefix in ("", f"/s/{wall.ids['session']}", "/s/nope"):
            target = row.replace(" ", f" {prefix}", 1)
            assert (await wall.send("agent", target, None, json=None)).status_code == 401, target
            for name, key in wall.keys.items():
                status = (await wall.send("agent", target, key, content=b"")).status_code
                project = name in ("project", "minted project")
                if project or (name == "session" and prefix != "/s/nope"):
                    assert status not in (401, 403), (target, name, status)
                else:
                    assert status in (401, 403), (target, name, status)


async def test_a_trainers_key_for_named_policies_reaches_no_other(home: House, wall: Wall) -> None:
    own = await wall.mint("own", role="trainer", policies=[POLICY])
    lease = {"trainer": "t", "policy": POLICY, "groups": 1}
    assert (await wall.send("trainer", "POST /leases", own, json=lease)).status_code == 204
    assert (await wall.send("trainer", f"GET /policies/{POLICY}", own)).status_code == 200
    assert (await wall.send("trainer", f"GET /dead-letters?policy={POLICY}", own)).status_code == 200
    assert (await wall.send("trainer", "GET /dead-letters", own)).status_code == 400
    rewind = {"step": 0, "versions": {"other": 0}}
    for row, body in {
        "POST /leases": {**lease, "policy": "other"},
        "POST /trainers/t/rewind": rewind,
        "GET /dead-letters?policy=other": None,
        "GET /policies/other": None,
        "POST /policies/other/begin_update": {"mode": "keep"},
        "POST /policies/other/push": {"path": "/w", "version": 1},
        "POST /policies/other/finish_update": {},
        "POST /policies/other/control": {"trainer": "t", "incarnation": 1, "control": {"max_turns": 3}},
        "GET /policies/other/ranks": None,
        "POST /policies/other/receive": {},
    }.items():
        answer = await wall.send("trainer", row, own, json=body)
        assert answer.status_code == 403, (row, answer.text)
        assert "other" in answer.json()["error"]["message"]
    unknown = {"role": "trainer", "name": "k", "policies": ["other"]}
    assert (await wall.send("admin", "POST /keys", wall.keys["admin"], json=unknown)).status_code == 404


async def test_a_trainers_key_for_named_policies_fences_no_other_trainer(home: House, wall: Wall) -> None:
    """A trainer that has rewound and not leased yet is known by the policies that it owns."""
    policies = home.app.ledger.policies
    await policies.register("other")
    theirs = Rewind(0, {"other": 0}, "their folder")
    incarnation = (await home.app.ledger.trainers.rewind("theirs", theirs)).incarnation
    own = await wall.mint("own", role="trainer", policies=[POLICY])
    attack = {"step": 0, "versions": {POLICY: 0}, "run": "mine", "take_over": True}
    answer = await wall.send("trainer", "POST /trainers/theirs/rewind", own, json=attack)
    assert answer.status_code == 403, answer.text
    await policies.check_weights_owner("other", FinishUpdate(trainer="theirs", incarnation=incarnation))


async def test_a_trainers_key_for_named_policies_leases_in_no_other_trainers_name(home: House, wall: Wall) -> None:
    """A step that it acknowledges would count as the other trainer's, whose own steps would then be behind it."""
    await home.app.ledger.policies.register("other")
    theirs = Rewind(0, {"other": 0}, "their folder")
    incarnation = (await home.app.ledger.trainers.rewind("theirs", theirs)).incarnation
    own = await wall.mint("own", role="trainer", policies=[POLICY])
    lease = {"trainer": "theirs", "policy": POLICY, "groups": 1, "incarnation": incarnation}
    answer = await wall.send("trainer", "POST /leases", own, json=lease)
    assert answer.status_code == 403, answer.text


async def test_a_fenced_trainer_sets_no_control(home: House, wall: Wall) -> None:
    """It would hold for the rollouts of the trainer that has the policy now."""
    trainers, key = home.app.ledger.trainers, wall.keys["trainer"]
    row = f"POST /policies/{POLICY}/control"
    control = {"max_turns": 3, "n": 2}
    unowned = {"trainer": "early", "incarnation": 0, "control": control}
    assert (await wall.send("trainer", row, key, json=unowned)).status_code == 409
    assert (await wall.send("trainer", row, key, json=control)).status_code == 400  # it names no trainer
    for name in ("old", "new"):
        restored = Rewind(0, {POLICY: 0}, f"run of {name}", take_over=True)
        owner = {"trainer": name, "incarnation": (await trainers.rewind(name, restored)).incarnation}
        assert (await wall.send("trainer", row, key, json={"control": control, **owner})).status_code == 200
    zombie = {"control": {"max_turns": 9}, "trainer": "old", "incarnation": 1}
    answer = await wall.send("trainer", row, key, json=zombie)
    assert answer.status_code == 409, answer.text
    assert "is trained by 'new'" in answer.json()["error"]["message"]
    assert await home.app.ledger.controls.of(POLICY) == RolloutControl(max_turns=3, n=2)
    entries = await home.app.ledger.audit.newest(limit=20)
    (own,) = [one for one in entries if one.action.endswith("/control") and '"new"' in str(one.detail)]
    assert json.loads(own.detail["body"])["control"] == control


CONTROLS = "POST /policies/{}/control"
BAD = [
    ({"max_turns": 0}, "max_turns is 1 to"),
    ({"max_turns": 10**30}, "max_turns: Expected `int` <= 2147483647"),
    ({"max_turns": 2**40}, "max_turns: Expected `int` <= 2147483647"),
    ({"turns": 3}, "turns"),
    ({"temperature": 0}, "temperature is 0.1 to 2.0, not 0"),
    ({"temperature": -0.5}, "temperature is 0.1 to 2.0"),
    ({"temperature": 1e300}, "temperature is 0.1 to 2.0"),
    ({"temperature": float("nan")}, "not JSON (which has no NaN"),
    ({"n": 0}, "n is 1 to 1,024"),
    ({"n": 5000}, "n is 1 to 1,024"),
    ({"priority": 2_000_000}, "priority is -1,000,000 to 1,000,000"),
    ({"curriculum": {"easy": -1}}, "the weight of 'easy' is 1e-06 to 1e+06, not -1"),
    ({"curriculum": {"easy": float("inf")}}, "not JSON (which has no NaN"),
    ({"curriculum": {"easy": 0}}, "leave a name out to open none of its tasks"),
    ({"curriculum": {"": 1}}, "neither a task's id nor a tag"),
    ({"curriculum": {"a\nb": 1}}, "neither a task's id nor a tag"),
    ({"curriculum": {str(number): 1 for number in range(65)}}, "at most 64 names, not 65"),
]


async def test_a_control_out_of_bounds_is_refused_by_name(home: House, wall: Wall) -> None:
    headers, row = {"content-type": "application/json"}, CONTROLS.format(POLICY)
    for control, says in BAD:
        answer = await wall.send("admin", row, wall.keys["admin"], content=json.dumps(control), headers=headers)
        assert answer.status_code == 400, (control, answer.text)
        assert says in message(answer), (control, says)
    assert await home.app.ledger.controls.of(POLICY) == RolloutControl()


async def test_attempts_for_evaluation_follow_no_control(home: House, wall: Wall) -> None:
    key = wall.keys["admin"]
    control = {"max_turns": 3, "temperature": 0.7}
    assert (await wall.send("admin", CONTROLS.format(POLICY), key, json=control)).status_code == 200
    caps: list[int] = []
    for tags in ([], ["purpose=eval"]):
        body = {"policy": POLICY, "n": 1, "task": {"id": "t", "instruction": "Look."}, "tags": tags}
        group = (await wall.send("admin", "POST /groups", key, json=body)).json()
        start = f"POST /rollouts/{group['rollouts'][0]['id']}/start"
        begun = (await wall.send("admin", start, key, json={"turns": 9})).json()
        caps.append(begun["turns"])
        session = (await wall.send("admin", f"GET /read/sessions/{begun['session_id']}", key)).json()
        assert session["summary"]["tags"].get("rolltap.temperature") == (None if tags else "0.7")
    assert caps == [3, 9]
    forged = {"policy": POLICY, "tags": {"rolltap.temperature": "nan"}}
    assert (await wall.send("admin", "POST /sessions", key, json=forged)).status_code == 400


async def test_groups_of_a_policy_that_is_not_served_are_not_leased(home: House, wall: Wall) -> None:
    """Nothing says which of its calls are trained, so a lease would carry no loss."""
    await home.app.ledger.policies.register("gone")  # by a server that had it in its settings
    lease = {"trainer": "t", "policy": "gone", "groups": 1}
    answer = await wall.send("trainer", "POST /leases", wall.keys["trainer"], json=lease)
    assert answer.status_code == 404, answer.text
    assert f"no policy 'gone'; served: {POLICY}" in answer.json()["error"]["message"]


async def test_a_keys_secret_is_shown_once(wall_of_all: Wall) -> None:
    listed = await wall_of_all.send("admin", "GET /keys", wall_of_all.keys["admin"])
    assert {key["id"] for key in listed.json()["keys"]} >= {wall_of_all.ids["minted runner"]}
    assert not any(key in listed.text for key in wall_of_all.keys.values())


async def test_two_projects_do_not_share_a_conversation(home: House, wall: Wall) -> None:
    ask = {"role": "user", "content": "Hi."}
    first = {"model": POLICY, "messages": [ask]}
    then = {"model": POLICY, "messages": [ask, {"role": "assistant", "content": "Hello."}, ask]}
    for name, call in (("project", first), ("minted project", then), ("project", then)):
        answer = await wall.send("agent", "POST /v1/chat/completions", wall.keys[name], json=call)
        assert answer.status_code == 200, answer.text
    sessions = (await home.client.get("/read/sessions"))["sessions"]
    tags = sorted(session["tags"].get("project", "") for session in sessions if "captured" in session["tags"])
    assert tags == ["", wall.ids["minted project"]]


@pytest.mark.parametrize(
    "tags",
    [
        {"turns": "abc"},
        {"turns": "-1"},
        {"turns": "\u0663"},
        {"turns": ""},
        {"roles": "..."},
        {"roles": "[" * 8000},
        {"roles": "[]"},
        {"roles": "{}"},
        {"roles": '{"judge": 1}'},
        {"roles": '{"judge": "other"}'},
        {"roles": '{"a b": "tiny"}'},
        {"captured": "openai_chat"},
        {"project": "another"},
        {"": "x"},
        {"x": "y" * 9000},
        {str(number): "" for number in range(33)},
    ],
)
async def test_tags_that_would_break_a_sessions_calls_open_none(wall_of_all: Wall, tags: dict[str, str]) -> None:
    answer = await wall_of_all.send("admin", "POST /sessions", wall_of_all.keys["admin"], json={"tags": tags})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith("tags")


async def test_sound_tags_open_a_session_whose_calls_are_answered(wall_of_all: Wall) -> None:
    tags = {"turns": "3", "roles": f'{{"judge": "{POLICY}"}}', "note": "x"}
    opened = await wall_of_all.send("admin", "POST /sessions", wall_of_all.keys["admin"], json={"tags": tags})
    call = {"model": "judge", "messages": [{"role": "user", "content": "Hi."}]}
    answer = await wall_of_all.send("agent", "POST /v1/chat/completions", opened.json()["key"], json=call)
    assert answer.status_code == 200, answer.text


async def test_what_was_done_and_refused_is_in_the_audit_log_with_the_keys_id(home: House, wall: Wall) -> None:
    opened = await wall.send("admin", "POST /sessions", wall.keys["minted admin"], json={"tags": {"note": "x"}})
    session = opened.json()["session_id"]
    await wall.send("admin", f"POST /sessions/{session}/close", wall.keys["minted admin"])
    push = {"path": "/nowhere", "version": 1}
    await wall.send("trainer", f"POST /policies/{POLICY}/push", wall.keys["minted trainer"], json=push)
    await wall.send("admin", "POST /keys", wall.keys["minted viewer"], json={"role": "admin", "name": "mine"})
    answer = await wall.send("admin", "GET /audit?limit=4", wall.keys["admin"])
    refused, pushed, closed, asked = answer.json()["entries"]
    assert (refused["key_id"], refused["action"]) == (wall.ids["minted viewer"], "refused POST /keys")
    assert (pushed["key_id"], pushed["detail"]["name"]) == (wall.ids["minted trainer"], POLICY)
    assert '"version":1' in pushed["detail"]["body"].replace(" ", "")
    assert (closed["key_id"], closed["detail"]["session_id"]) == (wall.ids["minted admin"], session)
    assert asked["action"] == "POST /sessions"
    whole = await wall.send("admin", "GET /audit?limit=1000", wall.keys["admin"])
    assert not any(key in whole.text for key in wall.keys.values())


async def test_a_reward_names_its_key(home: House, wall: Wall) -> None:
    group = await home.client.open_group(Task("t", "do it"), policy=POLICY, n=1)
    (rollout,) = group.rollout_ids
    await wall.send("admin", f"POST /rollouts/{rollout}/start", wall.keys["admin"])
    reward = {"rollout_id": rollout, "value": 0.5}
    appended = await wall.send("admin", "POST /rewards", wall.keys["minted evaluator"], json=reward)
    assert appended.json()["key_id"] == wall.ids["minted evaluator"]
    assert (await wall.send("admin", "POST /rewards", wall.keys["evaluator"], json=reward)).status_code == 409


@pytest.mark.parametrize("plane", TABLES)
async def test_no_route_reads_much_in_one_piece(plane: str, wall_of_all: Wall) -> None:
    """Agents' calls would wait meanwhile. The body of a key without the route's role isn't read."""
    large = b'{"surprise": [' + b"{}," * RequestBody.MOST_VALUES + b"{}]}"
    app = wall_of_all.planes[plane]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://proxy") as client:
        for path, methods in app.app.openapi()["paths"].items():
            if "requestBody" in methods.get("post", {}):
                for key, expected in (("viewer", {403}), (plane, {400, 413})):
                    headers = {"authorization": f"Bearer {wall_of_all.keys[key]}", "content-type": "application/json"}
                    answer = await client.post(path, content=large, headers=headers)
                    assert answer.status_code in expected, (path, answer.text)


async def test_a_runners_key_opens_sessions_of_judges_of_its_own_rollouts_only(home: House, wall: Wall) -> None:
    runner, other = await wall.mint("own", role="runner"), await wall.mint("other", role="runner")
    body = {"policy": POLICY, "n": 1, "tasks": [{"id": "t", "instruction": "Look."}]}
    assert (await wall.send("admin", "POST /tasks", wall.keys["admin"], json=body)).status_code == 200
    claimed = await wall.send("admin", "POST /nodes/n/claim", runner, json={"capacity": 1, "ttl": 60})
    (assigned,) = claimed.json()["rollouts"]
    rollout = assigned["rollout_id"]
    judge = {"policy": POLICY, "tags": {"kind": "judge", "rollout": rollout}}
    opened = await wall.send("admin", "POST /sessions", runner, json=judge)
    assert opened.status_code == 200, opened.text
    session = opened.json()["session_id"]
    for refused in (
        {"policy": POLICY},
        {**judge, "rollout_id": rollout},
        {"policy": POLICY, "tags": {"kind": "main", "rollout": rollout}},
    ):
        assert (await wall.send("admin", "POST /sessions", runner, json=refused)).status_code == 403
    assert (await wall.send("admin", "POST /sessions", other, json=judge)).status_code == 403
    assert (await wall.send("admin", f"POST /sessions/{session}/close", other)).status_code == 403
    assert (await wall.send("admin", f"POST /sessions/{session}/close", runner)).status_code == 200
