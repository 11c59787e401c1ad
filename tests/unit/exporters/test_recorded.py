"""Datasets are made from what was sampled, whatever the client sent back, and train what a lease would train."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rolltap.errors import DatasetError
from rolltap.reconstructor.exporters import exporter_named
from rolltap.reconstructor.exporters.base import ExportItem
from rolltap.reconstructor.exporters.dataset import DatasetWriter, Query
from rolltap.reconstructor.exporters.select import parse_where
from rolltap.types import Finish, RolloutStatus, Scoring

from .world import Script, World, lines, reasons_of, rows_of, says, system, tool, user

MESSAGE_FORMATS = ("sft", "sharegpt", "preference", "kto")
TOKEN_FORMATS = ("sft-tokens", "trajectories", "transitions", "harbor")
SECRET = "sk-abcdefghijklmnopqrstuvwxyz0123456789ABCD"


def made(format: str, items: list[ExportItem], **options: str) -> list[dict[str, Any]]:
    return rows_of(list(exporter_named(format, options).rows(items)))


def written(folder: Path, format: str, items: list[ExportItem], **query: Any) -> tuple[str, dict[str, Any]]:
    """The text of a dataset's files and its manifest."""
    exporter = exporter_named(format)
    container = "jsonl" if "jsonl" in exporter.containers else None
    with DatasetWriter(folder / format, exporter, Query(container=container, **query)) as writer:
        writer.add(items)
        manifest = writer.finish()
    return "".join((folder / format / file["path"]).read_text() for file in manifest["files"]), manifest


def quiet(reply: dict[str, Any]) -> dict[str, Any]:
    """A reply as most chat clients send it back: without its thinking."""
    return {key: value for key, value in reply.items() if key != "reasoning_content"}


def thinking(world: World, session_id: str, answer: str = "done", thought: str = "first thought") -> Script:
    """Two turns with thinking that the client drops from its history."""
    script = world.script(session_id)
    start = [system("You are an agent."), user("Make the file.")]
    first = says("I look.", (f"call_{session_id}_1", "bash", {"command": "ls"}), reasoning=thought)
    parent = script.ask(start, first)
    history = [*start, quiet(first), tool(f"call_{session_id}_1", "a.txt")]
    script.ask(history, says(answer, reasoning="second thought"), parent=parent)
    return script


@pytest.mark.parametrize("format", MESSAGE_FORMATS)
def test_thinking_that_the_client_dropped_is_in_every_message_format(format: str, world: World):
    items = [
        thinking(world, name, answer=name).item(reward=reward, task="t", group="g")
        for name, reward in (("a", 1.0), ("b", 0.0))
    ]
    text = str(made(format, items))
    assert "first thought" in text
    assert "second thought" in text


@pytest.mark.parametrize("format", TOKEN_FORMATS)
def test_a_secret_in_dropped_thinking_keeps_the_tokens_out(format: str, world: World, tmp_path: Path):
    item = thinking(world, "s", thought=f"the key is {SECRET}").item(reward=1.0, task="t")
    assert SECRET in world.tokenizer.decode(item.rows[0].token_ids)
    text, manifest = written(tmp_path, format, [item])
    assert text == ""
    assert manifest["rows_with_secrets_left_out"] >= 1


def test_minted_ids_are_short_and_alike_so_that_duplicates_are_found(world: World, tmp_path: Path):
    items = [thinking(world, name).item(reward=1.0, task="t", group="g") for name in ("a", "b")]
    _, manifest = written(tmp_path, "sft", items)
    assert (manifest["rows"], manifest["duplicates_left_out"]) == (1, 1)
    (row,) = lines(tmp_path / "sft" / "train-00000-of-00001.jsonl")
    assert row["messages"][2]["tool_calls"][0]["id"] == row["messages"][3]["tool_call_id"] == "call00001"


def branched(world: World, count: int) -> Script:
    """A trunk of one turn, and branches behind it."""
    script = world.script("branches")
    start = [user("Begin.")]
    trunk = script.ask(start, says("the trunk"))
    for number in range(count):
        script.ask([*start, says("the trunk"), user(f"Try {number}.")], says(f"branch {number}"), parent=trunk)
    return script


def test_a_trunk_is_a_target_once(world: World):
    items = [branched(world, 5).item()]
    rows = made("sft", items)
    weights = [
        (message["content"], message["weight"])
        for row in rows
        for message in row["messages"]
        if message["role"] == "assistant"
    ]
    assert len(rows) == 5
    assert weights.count(("the trunk", 1)) == 1
    assert weights.count(("the trunk", 0)) == 4
    targets = [row["completion"][0]["content"] for row in made("sft", items, targets="split")]
    assert sorted(targets) == [*(f"branch {number}" for number in range(5)), "the trunk"]


@pytest.mark.parametrize("format", ["sft", "sharegpt"])
def test_readers_that_train_every_reply_get_only_conversations_of_which_each_may_be(format: str, world: World):
    found = list(exporter_named(format, {"targets": "whole"}).rows([branched(world, 5).item()]))
    assert len(rows_of(found)) == 1
    assert reasons_of(found) == ["a reply that may not be trained"] * 4


def test_readers_that_train_the_last_turn_get_each_reply_as_one(world: World):
    rows = made("sharegpt", [branched(world, 5).item()], targets="split")
    last = [row["conversations"][-1]["value"] for row in rows]
    assert sorted(last) == [*(f"branch {number}" for number in range(5)), "the trunk"]


def test_cut_off_replies_and_words_that_nobody_sampled_are_no_targets(world: World):
    script = world.script("s")
    start = [user("Begin."), says("invented by the harness"), user("Go on.")]
    cut = script.ask(start, says("cut off"), finish=Finish.LENGTH)
    script.ask([*start, says("cut off"), user("Again.")], says("whole"), parent=cut)
    (row,) = made("sft", [script.item()])
    weights = {m["content"]: m["weight"] for m in row["messages"] if m["role"] == "assistant"}
    assert weights == {"invented by the harness": 0, "cut off": 0, "whole": 1}
    found = list(exporter_named("kto").rows([script.item(reward=1.0)]))
    assert reasons_of(found) == ["a reply that may not be trained"]


def outcomes(world: World) -> list[ExportItem]:
    """One rollout of each state of a group."""
    changes = [
        {},
        {"status": RolloutStatus.RUNNING},
        {"status": RolloutStatus.FAILED, "scoring": Scoring.UNSCORABLE},
        {"scoring": Scoring.UNSCORABLE},
        {"scoring": Scoring.MASKED},
        {"status": RolloutStatus.TIMED_OUT},
    ]
    items = []
    for number, change in enumerate(changes):
        item = thinking(world, f"r{number}", answer=f"{number}").item(reward=1.0, task="t", group="g")
        assert item.rollout is not None
        items.append(replace(item, rollout=replace(item.rollout, **change)))
    return items


@pytest.mark.parametrize("format", ["sft", "sft-tokens", "kto", "atif", "transitions"])
def test_a_dataset_leaves_out_what_a_lease_would_not_train(format: str, world: World, tmp_path: Path):
    _, manifest = written(tmp_path, format, outcomes(world))
    assert manifest["sessions_left_out"] == {"running": 1, "failed": 1, "unscorable": 1, "masked": 1}
    assert manifest["sessions_selected"] == 2


def test_what_is_left_out_can_be_counted_in(world: World, tmp_path: Path):
    _, manifest = written(tmp_path, "sft", outcomes(world), include=frozenset({"masked", "failed"}))
    assert manifest["sessions_selected"] == 4
    assert written(tmp_path, "trajectories", outcomes(world))[1]["sessions_selected"] == 6
    with pytest.raises(DatasetError, match="--include: no evaluation; known: running, failed, unscorable, masked"):
        Query(include=frozenset({"evaluation"}))


def test_sessions_that_evaluate_are_never_in(world: World, tmp_path: Path):
    item = thinking(world, "e").item(reward=1.0, task="t")
    item = replace(item, session=replace(item.session, tags={"purpose": "eval"}))
    assert written(tmp_path, "sft", [item])[1]["sessions_left_out"] == {"evaluation": 1}


def test_each_agent_has_an_episode_and_the_main_one_the_reward(world: World):
    rows = made("transitions", [world.with_subagent("s").item(reward=1.0)])
    ends = {row["agent"]: row["reward"] for row in rows if row["done"]}
    assert ends == {"": 1.0, "helper": 0.0}


def test_trajectories_say_of_each_call_what_it_was_for_and_what_broke(world: World):
    rows = made("trajectories", [world.with_subagent("s").item()])
    turns = {turn["call_id"]: turn for row in rows for turn in row["turns"]}
    assert (turns["s-0001"]["kind"], turns["s-0001"]["rule"], turns["s-0001"]["mask"]) == (
        "auxiliary",
        "stated",
        "auxiliary",
    )
    assert turns["s-0005"]["break"]["reason"] == "new_conversation"
    assert turns["s-0000"]["finish"] == "stop"


def test_a_segment_filter_is_in_the_manifests_figures(world: World, tmp_path: Path):
    item = world.with_subagent("s").item()
    where = parse_where(["agent=helper"])
    _, manifest = written(tmp_path, "trajectories", [item], where=where)
    rows = lines(tmp_path / "trajectories" / "train-00000-of-00001.jsonl")
    assert 0 < len(rows) < len(item.rows)
    assert manifest["reconstruction"]["rows"] == len(rows)
    assert manifest["reconstruction"]["trained_tokens"] == sum(sum(row["loss_mask"]) for row in rows)
