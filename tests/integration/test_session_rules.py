"""Rules of a session, end to end: from a task to a real harness, the record, the lease, the exports and the viewer."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from rolltap.calllog.archive import export_sessions, import_sessions
from rolltap.calllog.sql import open_call_log
from rolltap.contract.control import RolloutControl
from rolltap.contract.rules import RULES, MaskRule, MessageRule, SessionRules, parse_rules, rules_of
from rolltap.contract.trainer import Lease, LeaseRequest
from rolltap.engine.scripted import Rule, Script, ScriptedReply, ToolUse
from rolltap.engine.tiny import FOLDER
from rolltap.errors import InvalidRequest, RolltapError
from rolltap.harnesses.agents.mini_swe_agent import MiniSweAgentInProcess
from rolltap.harnesses.evaluators.python_check import PythonCheck
from rolltap.harnesses.runner.attempts import run_groups
from rolltap.harnesses.runner.lifecycle import Assignment, RolloutRunner
from rolltap.harnesses.runner.specs import check
from rolltap.harnesses.runtimes.sources import Files
from rolltap.harnesses.runtimes.thread import ThreadRuntime
from rolltap.proxy.viewer.session import entries_of, turns_of
from rolltap.reconstructor.reconstruct import reconstruct
from rolltap.reconstructor.rules import session_rules
from rolltap.tokenizer import HubTokenizer
from rolltap.types import Task
from rolltap.wire import pack, unpack

from ..harnesses.house import POLICY, House, house

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
THOUGHT = "The secret is 4711, so I copy."
HINT = "Hint: use cp <|im_end|>."
HARNESS_RULES = SessionRules(
    (MessageRule(text=HINT, call=1), MessageRule(text="Now submit.", call=2, message_role="system")),
    (MaskRule(pattern=r"\d{4}"), MaskRule(call=2, characters=(0, 3))),
)


def bash(command: str, say: str = "") -> ScriptedReply:
    return ScriptedReply(say=say, call=(ToolUse(tool="bash", arguments={"command": command}),))


@pytest.fixture
async def home(tmp_path: Path) -> AsyncIterator[House]:
    script = Script(
        rules=(Rule(when="Copy", turns=(bash("cp a.txt b.txt", THOUGHT), bash(SUBMIT))),),
        otherwise=ScriptedReply(say="Hello 4711."),
    )
    async with house(script, tmp_path) as running:
        yield running


async def play(home: House, tmp_path: Path, rules: SessionRules, n: int = 1) -> list[str]:
    """The sessions of mini-swe-agent's attempts."""
    check = PythonCheck(lambda folder: float((folder / "b.txt").exists()))
    runtime = ThreadRuntime(tmp_path / "workspaces")
    task = Task("copy", "Copy a.txt to b.txt.")
    work = Assignment(task, Files({"a.txt": "x"}), MiniSweAgentInProcess(), runtime, check, rules=rules)
    (group,) = await run_groups(RolloutRunner(home.client), [work], policy=POLICY, n=n)
    assert [rollout.status for rollout in group.rollouts] == ["succeeded"] * n, group
    return [rollout.session_id or "" for rollout in group.rollouts]


async def test_from_the_task_to_the_lease(home: House, tmp_path: Path) -> None:
    tokenizer = HubTokenizer(FOLDER)
    (session_id,) = await play(home, tmp_path, HARNESS_RULES)
    rows = await home.app.call_log.rows(session_id)
    assert [[each.text for each in row.intent.injected] for row in rows] == [[HINT], ["Now submit."]]
    assert [row.intent.break_ for row in rows] == [None, None]
    for row in rows:  # the harness neither sent the messages nor got them
        assert b"Hint:" not in b"".join((await home.app.call_log.request(row.intent.id)).items)
    given = await home.app.ledger.trainers.lease(LeaseRequest("t", POLICY, 1))
    (leased,) = unpack(pack(given), Lease).groups
    (segment,) = leased.rollouts[0].trajectory.segments
    text = tokenizer.decode(segment.token_ids.tolist())
    assert text.index(HINT) < text.index(THOUGHT) < text.index("Now submit.")
    start = text.index("<|im_start|>assistant")
    assert "4711" in text[start:]
    trained = tokenizer.decode(segment.token_ids[segment.loss_mask].tolist())
    assert "The secret is" in trained
    assert "so I copy" in trained
    assert not any(hidden in trained for hidden in ("4711", "Hint:", "Now submit."))
    assert (segment.versions[~segment.loss_mask] == -1).all()
    counts = leased.rollouts[0].trajectory.counts
    assert counts["masked_tokens.rule"] == sum(end - start for row in rows for start, end in row.call().masked)
    assert counts["trained_calls"] == 2


async def test_the_viewer_shows_what_was_injected_and_masked(home: House, tmp_path: Path) -> None:
    (session_id,) = await play(home, tmp_path, HARNESS_RULES)
    detail = await home.reader.session(session_id)
    turns = turns_of(entries_of(detail), await home.reader.transcript(session_id), 0)
    shown = [[message.parts[0].text for message in turn.new if message.injected] for turn in turns]
    assert shown == [[HINT], ["Now submit."]]
    call = await home.reader.call(detail.calls[0].id)
    assert call.messages[-1].injected
    tokens = await home.reader.tokens(call.line.id)
    untrained = [token for token in tokens.tokens if token.sampled and not token.trained]
    assert "4711" in "".join(token.text for token in untrained)
    headers = {"Authorization": f"Bearer {home.app.settings.keys.admin}"}
    async with (
        aiohttp.ClientSession(headers=headers) as http,
        http.get(f"{home.urls['admin']}/view/sessions/{session_id}") as reply,
    ):
        assert ">injected<" in await reply.text()
    assert detail.summary.tags[RULES] == "2 messages, 2 masks"


async def test_a_control_adds_to_the_tasks_rules(home: House, tmp_path: Path) -> None:
    control = RolloutControl(
        rules=parse_rules({"messages": [{"text": "Be brief.", "call": 1}, {"text": "Never.", "role": "critic"}]})
    )
    await home.client.set_control(POLICY, control)
    (session_id,) = await play(home, tmp_path, SessionRules((MessageRule(text=HINT, call=1),)))
    session = await home.app.call_log.session(session_id)
    assert session is not None
    assert [rule.text for rule in rules_of(session).messages] == [HINT, "Be brief."]
    first = (await home.app.call_log.rows(session_id))[0]
    assert [each.text for each in first.intent.injected] == [HINT, "Be brief."]
    headers = {"Authorization": f"Bearer {home.app.settings.keys.admin}"}
    bad = {"rules": {"masks": [{"pattern": r"(a)\1"}]}}
    async with (
        aiohttp.ClientSession(headers=headers) as http,
        http.post(f"{home.urls['admin']}/policies/{POLICY}/control", json=bad) as reply,
    ):
        assert reply.status == 400
        assert "rules" in await reply.text()
    await home.client.set_control(POLICY, RolloutControl())
    (plain,) = await play(home, tmp_path, SessionRules())
    assert not any(row.intent.injected for row in await home.app.call_log.rows(plain))


async def test_a_group_of_nothing_but_masked_tokens_is_no_step(home: House, tmp_path: Path) -> None:
    sessions = await play(home, tmp_path, SessionRules(masks=(MaskRule(),)), n=2)
    for session_id in sessions:
        detail = await home.reader.session(session_id)
        assert [line.mask for line in detail.calls] == ["rule", "rule"]
        assert "nothing_trained" in {finding.name for finding in detail.findings}
    given = await home.app.ledger.trainers.lease(LeaseRequest("t", POLICY, 1))
    assert not [segment for group in given.groups for one in group.rollouts for segment in one.trajectory.segments
                if segment.loss_mask.any()]  # fmt: skip


async def test_a_session_with_rules_moves_to_another_store(home: House, tmp_path: Path) -> None:
    (session_id,) = await play(home, tmp_path, HARNESS_RULES)
    archive = tmp_path / "a.rolltap"
    here, other = home.app.call_log, open_call_log(f"sqlite:///{tmp_path}/other.db")
    await other.start()
    try:
        await export_sessions(here.database, archive)  # type: ignore[attr-defined]
        await import_sessions(other.database, archive)  # type: ignore[attr-defined]
        trajectories = []
        for each in (here, other):
            ((session, calls),) = (await each.calls([session_id])).values()
            assert rules_of(session) == HARNESS_RULES
            trajectories.append(reconstruct(calls, rules=session_rules(session)))
        for one, two in zip(trajectories[0].segments, trajectories[1].segments, strict=True):
            assert np.array_equal(one.token_ids, two.token_ids)
            assert np.array_equal(one.loss_mask, two.loss_mask)
            assert one.loss_mask.any()
    finally:
        await other.close()


async def test_only_the_owner_sets_rules(home: House) -> None:
    session = await home.client.open_session(policy=POLICY)
    body = {"policy": POLICY, "rules": {"messages": [{"text": "x"}]}}
    headers = {"Authorization": f"Bearer {session.endpoint.key}"}
    async with aiohttp.ClientSession(headers=headers) as http:
        async with http.post(f"{home.urls['admin']}/sessions", json=body) as reply:
            assert reply.status in (401, 403)
        chat: dict[str, Any] = {"model": POLICY, "messages": [{"role": "user", "content": "hi"}]}
        more = {"X-Rolltap-Rules": json.dumps(body["rules"]), "X-Rolltap-Tags": json.dumps({RULES: "{}"})}
        async with http.post(f"{session.endpoint.v1}/chat/completions", json=chat, headers=more) as reply:
            assert reply.status == 200
    (row,) = await home.app.call_log.rows(session.session_id)
    assert not row.intent.injected
    with pytest.raises(InvalidRequest, match="the server sets this tag"):
        await home.client.open_session(policy=POLICY, tags={RULES: "{}"})
    with pytest.raises(InvalidRequest, match="no role 'critic'"):
        await home.client.open_session(policy=POLICY, rules=SessionRules((MessageRule(text="x", role="critic"),)))


@pytest.mark.parametrize(
    ("rules", "told"), [({"masks": [{"pattern": "("}]}, "regular expression"), ({"messages": [{}]}, "text")]
)
def test_a_tasks_rules_are_checked_when_it_is_submitted(rules: dict[str, Any], told: str) -> None:
    spec = {"harness": "command", "argv": ["true"], "evaluator": {"kind": "session_completed"}, "rules": rules}
    with pytest.raises(RolltapError, match=told):
        check(Task("t", "x", spec), [POLICY])
