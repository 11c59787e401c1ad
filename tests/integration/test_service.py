"""The rollout service as its users meet it: commands and HTTP against real processes."""

from __future__ import annotations

import asyncio
import json
import shlex
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from rolltap.contract.admin import SubmitTasks
from rolltap.errors import LedgerError, NotFound, TaskInvalid
from rolltap.types import Task

from ..forked_commands import forked_rolltap
from .service import ASK, POLICY, Service, end, service, until

PYTHON = "/usr/bin/python3"

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def home(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Service]:
    async with service(tmp_path_factory.mktemp("service"), start=forked_rolltap) as running:
        yield running


def write_tasks(folder: Path, count: int, **more: Any) -> str:
    path = folder / "tasks.jsonl"
    task = {"instruction": "hi", "evaluator": {"kind": "session_completed"}, **more}
    path.write_text("\n".join(json.dumps({"id": f"t{number}", **task}) for number in range(count)))
    return str(path)


def slow(seconds: float, **spec: Any) -> Task:
    """An agent that asks once and takes `seconds`."""
    argv = [PYTHON, "-c", f"{ASK}; import time; time.sleep({seconds})"]
    whole = {"harness": "command", "argv": argv, "evaluator": {"kind": "session_completed"}, **spec}
    return Task("slow", "hi", whole)


async def statuses(home: Service, submission: str) -> dict[str, int]:
    """How many rollouts there are of each status; none while the submission is not known."""
    try:
        async with home.client() as client:
            return (await client.get(f"/tasks/{submission}"))["rollouts"]
    except NotFound:
        return {}


async def attempts(home: Service, submission: str) -> list[int]:
    async with home.client() as client:
        groups = await client.submission_groups(submission)
    return [rollout.attempt for group in groups for rollout in group.rollouts]


async def test_a_file_of_tasks_is_run_to_its_end_here(home: Service) -> None:
    tasks = write_tasks(home.folder, 2)
    status, told = await home.run(
        "run", tasks, "--harness", "command", "--n", "8", "--id", "here", "--", PYTHON, "-c", ASK
    )
    assert status == 0, told
    assert "16 rollouts in" in told
    assert "0 not succeeded" in told
    async with home.client() as client:
        groups = await client.submission_groups("here")
        assert [group.status for group in groups] == ["complete"] * 2
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        assert [reward.value for rollout in rollouts for reward in rollout.rewards] == [1.0] * 16
        session = await client.get(f"/read/sessions/{rollouts[0].session_id}")
        assert [call["outcome"] for call in session["calls"]] == ["completed"]
    status, told = await home.run("status", "here")
    assert status == 0
    assert "16 succeeded" in told


async def test_a_sessions_forest_shows_each_calls_parent_break_and_reason(home: Service) -> None:
    def said(*texts: str) -> list[dict[str, str]]:
        return [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]

    async with home.client() as client, aiohttp.ClientSession() as http:
        opened = await client.open_session(policy=POLICY)
        headers = {"authorization": f"Bearer {opened.endpoint.key}"}
        for messages in (said("hi"), said("hi", "Hello.", "and?"), said("hi", "Goodbye.", "and?"), said("else")):
            body = {"model": POLICY, "messages": messages, "reasoning_effort": "high"}
            url = f"{opened.endpoint.base_url}/v1/chat/completions"
            async with http.post(url, headers=headers, json=body) as answer:
                assert answer.status == 200, await answer.text()
        shown = await client.get(f"/read/sessions/{opened.session_id}")
    first, plain, edited, other = shown["calls"]
    assert [call["parent_id"] for call in shown["calls"]] == [None, first["id"], first["id"], None]
    found = [(found["name"], found["grade"], found["count"]) for found in shown["findings"]]
    assert found == [("effort_not_applied", "info", 4)]
    assert (first["break_"], plain["break_"]) == (None, None)
    assert plain["shared"] == first["prompt_tokens"] + first["output_tokens"]
    assert edited["break_"]["reason"] == "history_edited"
    assert (edited["break_"]["parent_id"], edited["break_"]["message_index"]) == (first["id"], 1)
    assert edited["break_"]["token_index"] == edited["shared"] == first["prompt_tokens"]
    assert other["break_"]["reason"] == "new_conversation"
    status, told = await home.run("sessions", "show", opened.session_id)
    assert status == 0, told
    assert "INFO: 4 calls asked for an effort" in told
    lines = {call["id"]: next(line for line in told.splitlines() if call["id"][-6:] in line) for call in shown["calls"]}
    depth = {id: len(line) - len(line.lstrip("│├└─ ")) for id, line in lines.items()}
    assert depth[first["id"]] == depth[other["id"]] < depth[plain["id"]] == depth[edited["id"]]
    assert "break" not in lines[plain["id"]]
    assert f"break: history_edited at token {edited['shared']}" in lines[edited["id"]]
    assert "break: new_conversation at token 0" in lines[other["id"]]
    status, told = await home.run("sessions", "show", opened.session_id, "--json")
    assert [call["break_"] for call in json.loads(told)["calls"]] == [call["break_"] for call in shown["calls"]]


async def test_a_shown_call_is_of_the_kind_that_the_exports_have(home: Service) -> None:
    """The proxy's hint at the time of a title call is "main": the conversation beside it comes later."""
    tool = {"type": "function", "function": {"name": "ls", "parameters": {"type": "object", "properties": {}}}}
    async with home.client() as client, aiohttp.ClientSession() as http:
        opened = await client.open_session(policy=POLICY)
        headers = {"authorization": f"Bearer {opened.endpoint.key}"}
        for text, more in (("A title for: hi", {}), ("hi", {"tools": [tool]})):
            body = {"model": POLICY, "messages": [{"role": "user", "content": text}], **more}
            url = f"{opened.endpoint.base_url}/v1/chat/completions"
            async with http.post(url, headers=headers, json=body) as answer:
                assert answer.status == 200, await answer.text()
        read = await client.get(f"/read/sessions/{opened.session_id}")
    assert [call["kind"] for call in read["calls"]] == ["auxiliary", "main"]
    status, told = await home.run("sessions", "show", opened.session_id)
    assert status == 0, told
    assert "auxiliary completed" in told


async def test_nodes_run_what_was_submitted_for_them(home: Service) -> None:
    tasks = write_tasks(home.folder, 3, harness="command", argv=[PYTHON, "-c", ASK])
    status, told = await home.run("run", tasks, "--n", "4", "--detach", "--id", "detached")
    assert status == 0, told
    nodes = [home.command("node", "--until-idle", "--name", f"n{number}") for number in range(2)]
    assert await asyncio.gather(*(asyncio.to_thread(node.wait, 100) for node in nodes)) == [0, 0]
    assert await statuses(home, "detached") == {"succeeded": 12}


@pytest.mark.acceptance
async def test_a_killed_nodes_rollouts_are_run_by_another_within_30_seconds(home: Service) -> None:
    async with home.client() as client:
        await client.submit(SubmitTasks(POLICY, 2, [slow(3)], id="killed"))
    dead = home.command("node", "--name", "dead")
    await until(lambda: statuses(home, "killed"), {"running": 2})
    await end(dead, signal.SIGKILL)
    died = time.monotonic()
    heir = home.command("node", "--name", "heir")
    await until(lambda: attempts(home, "killed"), [2, 2])
    assert time.monotonic() - died < 30
    await until(lambda: statuses(home, "killed"), {"succeeded": 2})
    await end(heir)
    assert await attempts(home, "killed") == [2, 2]


@pytest.mark.acceptance
async def test_a_zombies_late_results_change_nothing(home: Service) -> None:
    async with home.client() as client:
        await client.submit(SubmitTasks(POLICY, 1, [slow(1)], id="zombie"))
        zombie = home.command("node", "--name", "zombie")
        await until(lambda: statuses(home, "zombie"), {"running": 1})
        zombie.send_signal(signal.SIGSTOP)  # its agent ends meanwhile
        heir = home.command("node", "--name", "heir")
        await until(lambda: statuses(home, "zombie"), {"succeeded": 1})
        await end(heir)
        before = await client.submission_groups("zombie")
        zombie.send_signal(signal.SIGCONT)
        await client.submit(SubmitTasks(POLICY, 1, [slow(0)], id="afterwards"))
        await until(lambda: statuses(home, "afterwards"), {"succeeded": 1})  # it is well again
        assert await end(zombie) == 0
        assert await client.submission_groups("zombie") == before
    (rollout,) = before[0].rollouts
    assert (rollout.attempt, len(rollout.rewards)) == (2, 1)


@pytest.mark.acceptance
async def test_a_run_that_is_interrupted_goes_on_by_its_id(home: Service) -> None:
    asks = f"{PYTHON} -c {shlex.quote(ASK)}"
    script = f"{asks}; mkdir {home.folder}/first || until [ -e {home.folder}/go ]; do sleep 0.1; done"
    tasks = write_tasks(home.folder, 1, harness="command", argv=["sh", "-c", script], runtime="process")
    words = ("run", tasks, "--n", "6", "--slots", "2", "--id", "interrupted")
    first = home.command(*words)

    async def one_has_ended() -> bool:
        return bool((await statuses(home, "interrupted")).get("succeeded"))

    await until(one_has_ended, True)
    await end(first, signal.SIGINT)
    assert (await statuses(home, "interrupted"))["succeeded"] == 1
    (home.folder / "go").touch()
    status, told = await home.run(*words)
    assert status == 0, told
    assert await statuses(home, "interrupted") == {"succeeded": 6}


async def test_a_cancelled_submission_ends_at_once(home: Service) -> None:
    async with home.client() as client:
        await client.submit(SubmitTasks(POLICY, 3, [slow(60)], id="cancelled"))
    node = home.command("node", "--slots", "2", "--name", "n1")

    async def one_runs() -> bool:
        return bool((await statuses(home, "cancelled")).get("running"))

    await until(one_runs, True)
    status, told = await home.run("cancel", "cancelled")
    assert status == 0, told
    assert await statuses(home, "cancelled") == {"cancelled": 3}
    await end(node)


async def test_what_no_node_could_run_is_refused_when_it_is_submitted(home: Service) -> None:
    async with home.client() as client:
        before = (await client.get("/tasks"))["submissions"]
        for spec, told in (
            ({"harness": "cluade-code"}, "claude-code, cline"),
            ({"runtime": "podman"}, "apptainer, bubblewrap"),
            ({"files": {"../x": "y"}}, "leaves the"),
            ({"folder": "here"}, "absolute"),
            ({"limits": {"agent_s": -1}}, "negative"),
            ({"evaluator": {"kind": "oracle"}}, "oracle"),
            ({"argv": []}, "needs the command"),
        ):
            with pytest.raises(TaskInvalid, match=told):
                await client.submit(SubmitTasks(POLICY, 1, [slow(1, **spec)]))
        without = Task("t", "hi", {"harness": "command", "argv": ["true"]})
        with pytest.raises(TaskInvalid, match="evaluator"):
            await client.submit(SubmitTasks(POLICY, 1, [without]))
        with pytest.raises(LedgerError, match="known: tiny"):
            await client.submit(SubmitTasks("other", 1, [slow(1)]))
        assert (await client.get("/tasks"))["submissions"] == before


async def test_the_event_stream_tells_of_one_submission_and_ends_with_it(home: Service) -> None:
    async with home.client() as client:
        await client.submit(SubmitTasks(POLICY, 2, [slow(0)], id="told"))
        await client.submit(SubmitTasks(POLICY, 1, [slow(0)], id="another"))
        node = home.command("node", "--name", "n1")
        headers = {"authorization": f"Bearer {home.env['ROLLTAP_ADMIN_KEY']}"}
        async with (
            aiohttp.ClientSession(headers=headers) as http,
            http.get(f"{home.admin_url}/tasks/told/events") as reply,
        ):
            body = (await reply.read()).decode()
        await end(node)
    events = [dict(line.split(": ", 1) for line in block.splitlines()) for block in body.strip().split("\n\n")]
    kinds = [event["event"] for event in events]
    assert kinds[0] == "progress"
    assert kinds[-1] == "ended"
    assert kinds.count("rollout_finished") == 2
    assert json.loads(events[-1]["data"])["rollouts"] == {"succeeded": 2}
