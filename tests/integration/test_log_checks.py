"""A harness's own log is compared with the record when its run ends; a session that it contradicts is not trained."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio

from rolltap.contract.admin import HarnessLog, LogEntry
from rolltap.contract.trainer import Lease, LeaseOptions
from rolltap.engine.scripted import Script, ScriptedReply
from rolltap.errors import InvalidRequest
from rolltap.harnesses.agents.command import AnyCommand
from rolltap.harnesses.evaluators.registry import SessionCompleted
from rolltap.harnesses.runner.attempts import run_groups
from rolltap.harnesses.runner.lifecycle import Assignment, RolloutRunner
from rolltap.harnesses.runtimes.process import ProcessRuntime
from rolltap.harnesses.runtimes.sources import Files
from rolltap.ids import new_id
from rolltap.trainer_client.lease.client import TrainerClient
from rolltap.types import Task

from ..harnesses.house import POLICY, House, house

AGENT = """
import json, os, sys, urllib.request as u
base, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
history, steps = [], []
for turn in range(3):
    history.append({"role": "user", "content": f"turn {turn}"})
    steps.append({"source": "user", "message": ""})
    body = {"model": os.environ["OPENAI_MODEL"], "messages": history}
    reply = json.load(u.urlopen(u.Request(base + "/chat/completions", json.dumps(body).encode(), headers)))
    history.append(reply["choices"][0]["message"])
    steps.append({"source": "agent", "metrics": {"completion_tokens": reply["usage"]["completion_tokens"]}})
log = {"schema_version": "ATIF-v1.5", "steps": steps}
exec(sys.argv[1])
open(os.path.join(os.environ["HOME"], "trajectory.json"), "w").write(log if isinstance(log, str) else json.dumps(log))
"""


async def session_of(home: House, change: str) -> dict[str, Any]:
    """A rollout of the agent, which changes its own log at the end: its session."""
    agent = AnyCommand(("/usr/bin/python3", "-c", AGENT, change))
    runtime = ProcessRuntime(home.workspaces)
    assignment = Assignment(Task("talk", "hi"), Files({}), agent, runtime, SessionCompleted())
    (group,) = await run_groups(RolloutRunner(home.client), [assignment], policy=POLICY, n=1)
    (rollout,) = group.rollouts
    assert rollout.status == "succeeded", rollout.reason
    return await home.client.get(f"/read/sessions/{rollout.session_id}")


def leased(home: House) -> Lease:
    trainer = TrainerClient(home.urls["trainer"], home.app.settings.keys.trainer, "t")
    trainer.rewind(0, {POLICY: 0})
    lease = trainer.lease(POLICY, groups=2, options=LeaseOptions(at_least=2))
    assert lease is not None
    return lease


SCRIPT = Script(otherwise=ScriptedReply(say="Hello."))
DROPS_A_TURN = "del log['steps'][3]"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def home(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[House]:
    async with house(SCRIPT, tmp_path_factory.mktemp("house")) as home:
        yield home


@pytest.mark.parametrize(
    ("change", "verdict", "text"),
    [
        ("", "match", "3 replies (3 with token counts)"),
        (DROPS_A_TURN, "mismatch", "1 recorded replies are not in the log"),
        ("log['steps'][1]['metrics']['completion_tokens'] += 1", "mismatch", "is not in the record"),
        ("log['steps'].append(log['steps'][1])", "mismatch", "is not in the record"),
        ("log = '{'", "none", "not JSON"),
        ("log = '[' * 100_000", "none", "not JSON"),
        ("log['steps'] = {'a': 3}", "none", "left no log"),
        ("log = {'not': 'ours'}", "none", "left no log"),
        ("os.symlink('/etc/passwd', os.path.join(os.environ['HOME'], 'trajectory.json')); sys.exit()", "none", "read"),
        ("os.mkfifo(os.path.join(os.environ['HOME'], 'trajectory.json')); sys.exit()", "none", "not a regular file"),
    ],
)
async def test_the_verdict_stands_on_the_session(home: House, change: str, verdict: str, text: str) -> None:
    session = await session_of(home, change)
    assert session["log_check"]["verdict"] == verdict, session["log_check"]
    assert text in session["log_check"]["text"]
    assert ("log_mismatch" in [found["name"] for found in session["findings"]]) == (verdict == "mismatch")


@pytest.mark.parametrize(("train", "trained"), [((), 0), (("log_mismatch",), 1)])
async def test_a_mismatch_is_leased_only_where_the_policy_says_so(train: Any, trained: int, tmp_path: Path) -> None:
    async with house(SCRIPT, tmp_path, train=train) as home:
        await session_of(home, DROPS_A_TURN)
        await session_of(home, "")
        lease = await asyncio.to_thread(leased, home)
    records = {
        record.trajectory.log_check.verdict.value: sum(int(one.loss_mask.sum()) for one in record.trajectory.segments)
        for group in lease.groups
        for record in group.rollouts
    }
    assert (records["match"] > 0, records.get("mismatch", 0) > 0) == (True, bool(trained))


async def test_a_log_may_hold_what_arrived_of_a_killed_proxys_reply(tmp_path: Path) -> None:
    """The other proxy's call has an intent and no completion: that process was killed in the middle of the reply."""
    async with house(SCRIPT, tmp_path) as home:
        session = await home.open()
        message = [{"role": "user", "content": "hi"}]
        async with openai.AsyncOpenAI(base_url=session.endpoint.v1, api_key=session.endpoint.key) as client:
            reply = await client.chat.completions.create(model=POLICY, messages=message)  # type: ignore[arg-type]
        assert reply.usage is not None
        (row,) = await home.app.call_log.rows(session.session_id)
        cut = replace(row.intent, id=new_id(), created_at=row.intent.created_at + 1)
        await home.app.call_log.append_intent(cut)
        entries = [
            LogEntry("user"),
            LogEntry("assistant", f"rs_call_{cut.id}0123456789abcd"),
            LogEntry("assistant", reply.id, reply.usage.completion_tokens),
        ]
        await home.client.close_session(session.session_id)
        check = await home.client.check_log(session.session_id, HarnessLog(entries))
    assert check.verdict == "match", check


async def test_a_log_is_compared_once_after_the_session_and_before_its_rollout_ends(tmp_path: Path) -> None:
    async with house(SCRIPT, tmp_path) as home:
        opened = await home.open()
        with pytest.raises(InvalidRequest, match="close it"):
            await home.client.check_log(opened.session_id, HarnessLog(problem="none here"))
        await home.client.close_session(opened.session_id)
        first = await home.client.check_log(opened.session_id, HarnessLog(problem="none here"))
        assert (first.verdict, first.text) == ("none", "none here")
        assert await home.client.check_log(opened.session_id, HarnessLog(problem="another")) == first
        over = await home.client.get(f"/read/sessions/{(await session_of(home, ''))['summary']['id']}")
        again = await home.client.check_log(over["summary"]["id"], HarnessLog(problem="too late"))
        assert (again.verdict, again.text) == (over["log_check"]["verdict"], over["log_check"]["text"])
