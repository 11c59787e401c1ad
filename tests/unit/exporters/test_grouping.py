"""Sessions of no rollout are scored, grouped and paired; volatile text keeps no pair apart."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import rolltap
from rolltap.calllog.database import Database
from rolltap.calllog.facts import CallCompletion, CallIntent, RequestParts
from rolltap.calllog.sql import SqlCallLog
from rolltap.protocols.base import WireRequest
from rolltap.protocols.conversation import Message, Text
from rolltap.reconstructor.exporters.conversation import opening_key
from rolltap.reconstructor.exporters.preference import Preference
from rolltap.types import Finish, Outcome, Session, VersionSpan
from tests.dialects import DIALECTS

from .test_record import run
from .world import World, lines, says, system, user

PAGE = Path(__file__).parents[3] / "docs" / "exports.md"
SAID = {
    "a": ("It is 2026-03-01 09:14. You work in /home/ann/run0.", "Add 2 and 2."),
    "b": ("It is 2026-03-02 17:01. You work in /home/ann/run1.", "Add 2 and 2."),
    "c": ("It is 2026-03-02 18:30. You work in /tmp/x/y.", "Add 2 and 2."),
    "d": ("It is 2026-03-02 19:30. You work in /tmp/x/z.", "Add 2 and 3."),
}


async def _record(url: str) -> None:
    log = SqlCallLog(Database(url))
    await log.start()
    for number, (name, (frame, question)) in enumerate(SAID.items()):
        await log.open_session(Session(name, "tiny", f"hash-{name}", 1_772_000_000.0 + number, 2e9, tags={"run": "7"}))
        body = {"model": "tiny", "messages": [system(frame), user(question)]}
        chat = DIALECTS["openai_chat"].parse(WireRequest("", {}, {}, {}, json.dumps(body).encode()))
        await log.append_intent(
            CallIntent(
                f"{name}-0", name, "process", 1_772_000_001.0 + number, "tiny", "openai_chat",
                np.asarray([1, 2, number], np.int32), RequestParts(chat.head, chat.items, 0, chat.fixed),
            )
        )  # fmt: skip
        reply = Message("assistant", (Text(f"answer of {name}"),))
        await log.append_completion(
            CallCompletion(
                f"{name}-0", 1_772_000_002.0, Outcome.COMPLETED, Finish.STOP, np.asarray([7, number], np.int32),
                np.asarray([-0.5, -0.25], np.float32), (VersionSpan(2, 0, 2),), message=msgspec.json.encode(reply),
            )
        )  # fmt: skip
    await log.close()


@pytest.fixture
def store(tmp_path: Path) -> str:
    """Four captured sessions; three ask the same. Each has a score but the last."""
    url = f"sqlite:///{tmp_path}/rolltap.db"
    asyncio.run(_record(url))
    with rolltap.open(url) as record:
        for name, value in (("a", 0.2), ("a", 1.0), ("b", 0.0), ("c", 0.5)):
            record.score(name, value, "correct")
        record.score("d", 9.0, "another")
        record.tag("d", "set", "x")
        record.tag("a", "set", "x")
    return url


def export(store: str, folder: Path, *args: str) -> tuple[list[Any], Any]:
    status, told = run(store, folder, *args)
    assert status == 0, told
    manifest = json.loads((folder / "manifest.json").read_text())
    return [row for file in sorted(folder.glob("*.jsonl")) for row in lines(file)], manifest


def test_sessions_that_begin_alike_are_paired_by_their_score(store: str, tmp_path: Path):
    out = tmp_path / "out"
    rows, manifest = export(
        store, out, "--for", "trl", "--format", "preference", "--score", "correct", "--group-by", "opening"
    )
    assert [(row["session_chosen"], row["session_rejected"]) for row in rows] == [("a", "b")]
    assert (rows[0]["reward_chosen"], rows[0]["rollout_chosen"], rows[0]["task_id"]) == (1.0, None, None)
    assert rows[0]["prompt"][0]["content"] == SAID["a"][0]
    assert manifest["skipped"] == {"no reward": 1}
    assert manifest["query"]["grouping"] == {"score": "correct", "by": "opening"}


def test_a_tag_groups_too_also_one_that_came_later(store: str, tmp_path: Path):
    asked = ["--score", "correct", "--for", "trl", "--format", "kto", "--option", "threshold=0.4"]
    rows, _ = export(store, tmp_path / "run", *asked, "--group-by", "tag.run")
    assert {row["session_id"]: (row["label"], row["group_id"]) for row in rows} == {
        "a": (True, "run=7"), "b": (False, "run=7"), "c": (True, "run=7")
    }  # fmt: skip
    rows, _ = export(store, tmp_path / "set", *asked, "--group-by", "tag.set", "--where", "tag.set=x")
    assert [row["group_id"] for row in rows] == ["set=x"]


def test_the_best_of_a_group_is_chosen(store: str, tmp_path: Path):
    asked = ["--for", "verl", "--container", "jsonl", "--score", "correct", "--group-by", "opening", "--best", "1"]
    rows, _ = export(store, tmp_path / "out", *asked)
    assert [row["session_id"] for row in rows] == ["a"]


def test_without_a_score_a_session_has_no_reward(store: str, tmp_path: Path):
    rows, manifest = export(store, tmp_path / "out", "--for", "trl", "--format", "preference", "--group-by", "opening")
    assert (rows, manifest["skipped"]) == ([], {"no reward": 4})


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--group-by", "harness"], "--group-by: expected opening or tag.NAME, not 'harness'"),
        (["--group-by", "tag.run", "--state", "known"], "--group-by groups all sessions"),
        (["--score", "correct", "--state", "known"], "--score may come after a session's end"),
    ],
)
def test_what_cannot_be_grouped_is_named(args: list[str], message: str, store: str, tmp_path: Path):
    status, told = run(store, tmp_path / "out", *args)
    assert status == 1
    assert message in " ".join(told.split())
    assert not (tmp_path / "out").exists()


def pairs(world: World, *openings: tuple[str, str], ignore: Any = ()) -> list[Any]:
    items = []
    for number, (frame, question) in enumerate(openings):
        script = world.script(f"s{number}")
        script.ask([system(frame), user(question)], says(f"answer {number}"))
        items.append(replace(script.item(reward=float(number), task="t"), ignore=ignore))
    return [row for row in Preference().rows(items) if hasattr(row, "values")]


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ("It is 09:14 on Monday, March 2, 2026.", "It is 5:01 PM on Tuesday, March 3, 2026.", True),
        ("Work in /home/a/run-0/repo now", "Work in /home/a/run-1/repo now", True),
        (
            "x-anthropic-billing-header: cch=ab1;\nHelp.",
            "x-anthropic-billing-header: cch=99;\nHelp.",
            True,
        ),
        ("Trial 9f8b6c1e-0a1b-4c2d-8e3f-001122334455", "Trial 0f8b6c1e-0a1b-4c2d-8e3f-001122334455", True),
        ("You are brief.", "You are verbose.", False),
        ("You have 3 tries.", "You have 4 tries.", False),
    ],
)
def test_what_changes_by_itself_keeps_no_pair_apart(one: str, other: str, alike: bool, world: World):
    assert len(pairs(world, (one, "Go."), (other, "Go."))) == alike
    assert len(pairs(world, ("Help.", one), ("Help.", other))) == alike


def test_what_a_policy_ignores_keeps_no_pair_apart(world: World):
    seats = ("You sit at desk 7.", "Go."), ("You sit at desk 8.", "Go.")
    assert pairs(world, *seats) == []
    (row,) = pairs(world, *seats, ignore=(re.compile(r"desk \d+"),))
    assert row.values["prompt"][0]["content"] == "You sit at desk 8."


def test_users_words_tell_sessions_apart(world: World):
    keys = []
    for number, question in enumerate(("Read /data/in/a.txt", "Read /data/in/b.txt", "Read /data/in/a.txt")):
        script = world.script(f"s{number}")
        script.ask([system(f"Now: 2026-03-0{number + 1}"), user(question)], says("done"))
        keys.append(opening_key(script.item()))
    assert keys[0] == keys[2] != keys[1]


def test_the_pages_example_runs(store: str, tmp_path: Path):
    section = PAGE.read_text().partition("## Sessions without rollouts")[2].partition("\n## ")[0]
    code, command = re.findall(r"```(?:python)?\n(.*?)```", section, re.S)
    exec(compile(code.replace("rolltap.open()", f"rolltap.open({store!r})"), str(PAGE), "exec"), {})
    args = command.split()
    assert args[:2] == ["rolltap", "export"]
    rows, _ = export(store, tmp_path / args[2].strip("/"), *args[3:])
    assert [(row["session_chosen"], row["session_rejected"]) for row in rows] == [("a", "c")]
