"""What stands in the rows that other trainers read; `tests/trainers` has their own code read them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from rolltap.reconstructor.exporters import exporter_named
from rolltap.reconstructor.exporters.base import ExportItem
from rolltap.types import Finish, RolloutStatus

from .world import World, reasons_of, rows_of, says, tool, user


def made(format: str, *items: ExportItem, **options: str) -> list[dict[str, Any]]:
    return rows_of(list(exporter_named(format, options).rows(items)))


def skipped(format: str, *items: ExportItem) -> list[str]:
    return reasons_of(list(exporter_named(format).rows(items)))


def cut_in_the_middle(world: World) -> ExportItem:
    """Three replies, of which the second hit its limit and carries no loss."""
    script = world.script("cut")
    first = says("I look.", ("c1", "bash", {"command": "ls"}), reasoning="where?")
    history = [user("Make the file.")]
    parent = script.ask(history, first)
    history = [*history, first, tool("c1", "a.txt")]
    second = says("There is")
    parent = script.ask(history, second, parent=parent, finish=Finish.LENGTH)
    script.ask([*history, second, user("Go on.")], says("a file."), parent=parent)
    return script.item(reward=0.5, task="t")


def test_verifiers_paths_hold_each_token_once(world: World):
    item = cut_in_the_middle(world)
    (row,) = made("verifiers", item)
    (trace,) = row["traces"]
    (segment,) = item.rows
    assert np.array_equal(np.concatenate([node.get("token_ids", []) for node in trace["nodes"]]), segment.token_ids)
    assert np.array_equal(np.concatenate([node.get("mask", []) for node in trace["nodes"]]), segment.loss_mask)
    sampled = [node for node in trace["nodes"] if node.get("sampled")]
    assert [len(node["logprobs"]) > 0 for node in sampled] == [True, False, True]
    assert [call["finish_reason"] for call in trace["calls"]] == ["tool_calls", "length", "stop"]
    assert [trace["nodes"][call["node"]] for call in trace["calls"]] == sampled
    (call,) = sampled[0]["message"]["tool_calls"]
    assert call == {"id": "c1", "name": "bash", "arguments": '{"command": "ls"}'}
    assert [node["parent"] for node in trace["nodes"]] == [None, *range(len(trace["nodes"]) - 1)]


def test_the_temperature_that_was_sampled_at_is_said(world: World):
    item = world.solved("s").item(reward=1.0, task="t")
    texts = {name: replace(text, sampling={"temperature": 0.7, "n": 1}) for name, text in item.texts.items()}
    item = replace(item, texts=texts)
    (row,) = made("verifiers", item)
    assert [call["sampling"] for call in row["traces"][0]["calls"]] == [{"temperature": 0.7}] * 2
    assert made("nemo-gym", item)[0]["responses_create_params"]["temperature"] == 0.7


def test_verifiers_gives_a_branch_to_each_agent_and_says_what_became_of_the_rollout(world: World):
    item = world.with_subagent("s").item(reward=0.5, task="t")
    (row,) = made("verifiers", item)
    assert sum(node["parent"] is None for node in row["traces"][0]["nodes"]) == len(item.rows)
    assert (row["ok"], row["is_timeout"], row["group"]) == (True, False, {"id": "group-t"})
    assert item.rollout is not None
    for status, ok in ((RolloutStatus.TIMED_OUT, True), (RolloutStatus.FAILED, False)):
        changed = world.solved("x").item(task="t", rollout=replace(item.rollout, status=status))
        (row,) = made("verifiers", changed)
        assert (row["ok"], row["is_timeout"]) == (ok, status is RolloutStatus.TIMED_OUT)


def test_a_segment_without_its_text_is_counted(world: World):
    script = world.solved("s")
    item = script.item(reward=1.0, task="t", texts={})
    assert skipped("verifiers", item) == skipped("nemo-gym", item)
    assert skipped("verifiers", item) == ["a segment whose messages are not on record"]


def test_nemo_gym_puts_ids_on_the_last_item_of_each_trained_reply(world: World):
    item = cut_in_the_middle(world)
    (row,) = made("nemo-gym", item)
    assert row["responses_create_params"]["input"] == [{"type": "message", "role": "user", "content": "Make the file."}]
    kinds = [(one["type"], "generation_token_ids" in one) for one in row["response"]["output"]]
    assert kinds == [
        ("reasoning", False),
        ("message", False),
        ("function_call", True),
        ("function_call_output", False),
        ("message", False),  # the reply that was cut off
        ("message", False),  # the user's
        ("message", True),
    ]
    assert row["reward"] == 0.5


def test_formats_of_one_run_of_tokens_skip_what_broke_off(world: World):
    forked = world.with_subagent("s").item(reward=0.5, task="t")
    for format in ("nemo-gym", "trl-grpo"):
        assert skipped(format, forked) == ["more than one run of tokens"]
        assert skipped(format, world.solved(format).item(task="t")) == ["no reward"]


def test_rollouts_of_a_group_are_of_one_task_of_nemo_gym_whatever_else_is_exported(world: World):
    group = [world.solved(name).item(reward=1.0, task="t", group="g") for name in ("a", "b")]
    rows = made("nemo-gym", *group)
    assert [row["_ng_rollout_index"] for row in rows] == [0, 1]
    assert len({row["_ng_task_index"] for row in rows}) == 1
    (other,) = made("nemo-gym", world.solved("c").item(reward=1.0, task="t", group="h"))
    assert other["_ng_task_index"] != rows[0]["_ng_task_index"]


def test_trl_grpo_rows_are_the_segment_behind_its_prompt(world: World):
    item = cut_in_the_middle(world)
    (segment,) = item.rows
    (row,) = made("trl-grpo", item)
    assert np.array_equal([*row["prompt_ids"], *row["completion_ids"]], segment.token_ids)
    assert np.array_equal(row["env_mask"], segment.loss_mask[segment.prompt_length :])
    assert np.array_equal(row["logprobs"], segment.logprobs[segment.prompt_length :])


def test_skyrl_rows(world: World):
    item = cut_in_the_middle(world)
    (segment,) = item.rows
    (row,) = made("skyrl-sft", item)
    assert np.array_equal(row["input_ids"], segment.token_ids)
    assert np.array_equal(row["loss_mask"], segment.loss_mask)
    (prompt,) = made("skyrl-rl", item, env_class="ours")
    assert (prompt["env_class"], prompt["prompt"]) == ("ours", [{"role": "user", "content": "Make the file."}])
