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
from rolltap.reconstructor.exporters.where import parse_where
from rolltap.types import Finish, Outcome, RolloutStatus, Scoring

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


def interrupted(world: World) -> ExportItem:
    """A reply that was cut off by its client, which keeps what it has; two more replies."""
    script = world.script("s")
    start = [user("List the files."), says("a long")]
    cut = script.ask(start[:1], says("a long"), outcome=Outcome.ABORTED, finish=Finish.ABORT)
    second = script.ask([*start, user("go on")], says("fine"), parent=cut)
    script.ask([*start, user("go on"), says("fine"), user("and on")], says("more"), parent=second)
    script.texts[cut] = replace(script.texts[cut], reply=None)  # an aborted call has no message
    item = script.item(reward=1.0, task="t")
    assert [turn.trained for turn in item.rows[0].turns] == [False, True, True]
    return item


KEPT = [("user", "List the files."), ("assistant", "a long"), ("user", "go on"), ("assistant", "fine")]
KEPT += [("user", "and on"), ("assistant", "more")]


def said(messages: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in messages]


def test_what_a_client_kept_of_an_interrupted_reply_is_context(world: World):
    item = interrupted(world)
    (sft,) = made("sft", [item])
    assert said(sft["messages"]) == KEPT
    assert [message.get("weight") for message in sft["messages"]] == [None, 0, None, 1, None, 1]
    (row,) = made("trajectories", [item])
    assert said(row["messages"]) == KEPT
    (completion,) = (row["completion"] for row in made("kto", [item]))
    assert said(completion) == KEPT[3:]
    (episode,) = made("verifiers", [item])
    nodes = episode["traces"][0]["nodes"]
    assert said([node["message"] for node in nodes]) == KEPT
    sampled = [node for node in nodes if node.get("sampled")]
    assert [id for node in sampled for id in node["token_ids"]] == item.rows[0].token_ids.tolist()
    (rollout,) = made("nemo-gym", [item])
    assert [output.get("role") for output in rollout["response"]["output"]] == ["assistant", "user", "assistant"]
    (document,) = made("atif", [item])
    assert [step["message"] for step in document["steps"]] == [text for _, text in KEPT]
    assert len(made("sharegpt", [item], targets="split")) == 2


@pytest.mark.parametrize("format", ["sft", "sharegpt"])
def test_a_run_of_tokens_without_a_conversation_is_counted(format: str, world: World):
    script = world.script("s")
    lost = script.ask([user("hi")], says("hello"))
    script.ask([user("other")], says("there"))
    del script.texts[lost]
    found = list(exporter_named(format).rows([script.item()]))
    assert (len(rows_of(found)), reasons_of(found)) == (1, ["no conversation that may be trained"])
    script.texts.clear()
    lost_all = list(exporter_named(format).rows([script.item()]))
    assert reasons_of(lost_all) == ["no conversation that may be trained"] * 2


def test_a_reply_that_the_client_left_out_costs_atif_no_message(world: World):
    script = world.script("s")
    start = [user("Make the file.")]
    silent = script.ask(start, says("", reasoning="hm"))
    later = [*start, says("", reasoning="hm"), user("You said nothing."), says("ah"), user("Go on.")]
    second = script.ask(later[:3], says("ah"), parent=silent)
    script.ask(later, says("done"), parent=second)
    for call_id in (second, script.calls[-1].id):
        text = script.texts[call_id]
        script.texts[call_id] = replace(text, messages=[each for each in text.messages if each["content"]])
    (document,) = made("atif", [script.item()])
    told = ["Make the file.", "", "You said nothing.", "ah", "Go on.", "done"]
    assert [step["message"] for step in document["steps"]] == told


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
