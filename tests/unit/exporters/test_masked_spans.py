"""What a rule of the session masks is trained by no format; what it put into a prompt is in each that has the text."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rolltap.reconstructor.exporters import EXPORTERS, exporter_named
from rolltap.reconstructor.exporters.base import ExportItem, Row
from rolltap.reconstructor.reconstruct import reconstruct

from .world import World, says, user

MASKED = "the masked secret"
HINT = "an injected hint"
NO_ROWS_OF_REPLIES = ("verl-rl", "skyrl-rl", "trajectories", "atif")
"""Prompts alone; or formats for reading, which mark what is trained."""


def item_of(world: World, name: str, *, masked: bool) -> ExportItem:
    """Two turns. The first reply is masked in part, or neither is."""
    script = world.script(name)
    first = script.ask([user("Who?")], says(f"I say {MASKED}."))
    history = [user("Who?"), says(f"I say {MASKED}."), user("And?")]
    script.ask(history, says(f"All of it, {name}."), parent=first)
    item = script.item(reward=float(name == "a"), task="t", group="g")
    text = replace(item.texts[first], injected=[(1, {"role": "user", "content": HINT})])
    calls = dict(item.calls)
    if masked:
        calls[first] = replace(calls[first], masked=((1, len(calls[first].output_ids)),))
    trajectory = reconstruct(calls.values())
    return replace(item, calls=calls, trajectory=trajectory, texts={**item.texts, first: text})


def rows_of(format: str, items: list[ExportItem]) -> list[Row]:
    return [row for row in exporter_named(format).rows(items) if isinstance(row, Row)]


def trained(row: Row, world: World) -> str:
    """The text that a trainer of this row trains, as far as the row's own marks tell."""
    values = dict(row.values)
    for ids, mask in (("input_ids", "labels"), ("input_ids", "loss_mask"), ("token_ids", "loss_mask")):
        if ids in values and mask in values:
            kept = np.asarray(values[mask]) > 0 if mask != "labels" else np.asarray(values[mask]) >= 0
            return world.tokenizer.decode(np.asarray(values[ids])[kept].tolist())
    if "env_mask" in values:
        return world.tokenizer.decode(np.asarray(values["completion_ids"])[np.asarray(values["env_mask"]) > 0].tolist())
    if "tokens" in values and "loss_mask" in values:
        mask = np.asarray(values["loss_mask"])
        return world.tokenizer.decode(np.asarray(values["tokens"])[-len(mask) :][mask > 0].tolist())
    if "messages" in values and any("weight" in each for each in values["messages"]):
        return json.dumps([each for each in values["messages"] if each.get("weight")])
    return ""


@pytest.mark.parametrize("format", sorted(set(EXPORTERS) - set(NO_ROWS_OF_REPLIES)))
def test_no_format_trains_a_masked_span(world: World, format: str) -> None:
    plain = rows_of(format, [item_of(world, "a", masked=False), item_of(world, "b", masked=False)])
    assert plain, "the format has rows of such a session"
    masked = rows_of(format, [item_of(world, "a", masked=True), item_of(world, "b", masked=True)])
    for row in masked:
        text = trained(row, world)
        if not text:  # a format that trains all that is in it
            assert MASKED not in as_text(row.values, world), format
        assert MASKED not in text, format
        if text:
            assert "All of it" in text, format


def as_text(value: Any, world: World) -> str:
    """The text of what a row trains, of tokens, too. Text beside tokens is for reading."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, dict) and "token_ids" in value and "mask" in value:
        return world.tokenizer.decode([id for id, kept in zip(value["token_ids"], value["mask"], strict=True) if kept])
    if isinstance(value, dict) and "text" in value:
        return ""
    if isinstance(value, dict):
        kept = (each for name, each in value.items() if "prompt" not in name and name not in ("messages", "input"))
        return " ".join(as_text(each, world) for each in kept)
    if isinstance(value, list | tuple):
        if value and all(isinstance(each, int) and each >= 0 for each in value):
            return world.tokenizer.decode(list(value))
        return " ".join(as_text(each, world) for each in value)
    return str(value)


@pytest.mark.parametrize("format", ["sft", "sharegpt", "preference", "kto", "verifiers", "trajectories"])
def test_an_injected_message_is_in_the_text(world: World, format: str) -> None:
    rows = rows_of(format, [item_of(world, "a", masked=False), item_of(world, "b", masked=False)])
    assert rows
    assert all(HINT in json.dumps(dict(row.values), default=str) for row in rows)
    (text, *_) = [json.dumps(dict(row.values), default=str) for row in rows]
    assert text.index("Who?") < text.index(HINT) < text.index(MASKED)
