"""Forks in every format: what the origin sampled is context, and trained by no row of the fork."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from rolltap.reconstructor.exporters import EXPORTERS
from rolltap.reconstructor.exporters.base import ExportItem
from rolltap.reconstructor.exporters.conversation import conversations

from .test_masked_spans import HINT, NO_ROWS_OF_REPLIES, as_text, rows_of, trained
from .world import World, says, user

BEFORE = "what the origin said"
BEGUN = "a beginning that was kept"


def fork_of(world: World, name: str, *, inside: bool, reward: float) -> ExportItem:
    """A fork after the origin's reply, whose request had an injected message, or `inside` it; then a turn more."""
    script = world.script(name)
    said = f"{BEFORE}."
    origin = script.ask([user("Who?")], says(said), sampled_by="r")
    script.texts[origin] = replace(script.texts[origin], injected=[(1, {"role": "user", "content": HINT})])
    injected = script.texts[origin].injected
    history, parent = [user("Who?"), says(said), user("And?")], origin
    reply = f"{BEGUN}, so {name}."
    if inside:
        kept = world.reply(history, says(f"{BEGUN}, ")).removesuffix("<|im_end|>")
        parent = script.ask(history, says(""), sampled=kept, parent=origin, sampled_by="r")
        first = script.ask(history, says(reply), sampled=f"so {name}.<|im_end|>", parent=parent)
        call = script.calls[-1]
        begun = script.calls[-2]
        prompt = np.concatenate([begun.prompt_ids, begun.output_ids])
        script.calls[-1] = replace(call, prompt_ids=prompt)
        script.texts[parent] = replace(script.texts[parent], reply=None, injected=injected)
    else:
        first = script.ask(history, says(reply), parent=parent)
    script.texts[first] = replace(script.texts[first], injected=injected)
    last = script.ask([*history, says(reply), user("More?")], says(f"The end of {name}."), parent=first)
    script.texts[last] = replace(script.texts[last], injected=injected)
    return script.item(reward=reward, task="t", group="g")


def both(world: World, *, inside: bool) -> list[ExportItem]:
    return [fork_of(world, name, inside=inside, reward=float(name == "a")) for name in "ab"]


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("format", sorted(set(EXPORTERS) - set(NO_ROWS_OF_REPLIES)))
def test_no_format_trains_what_the_origin_sampled(world: World, format: str, inside: bool) -> None:
    rows = rows_of(format, both(world, inside=inside))
    if format == "sharegpt" or (inside and format in ("preference", "kto")):
        assert not rows, "whole conversations, or completions, of which a part may not be trained"
        return
    if format == "verifiers":  # a message without tokens is context
        nodes = [node for row in rows for node in row.values["traces"][0]["nodes"] if "mask" in node]
        text = " ".join(as_text({**node, "message": ""}, world) for node in nodes)
    else:
        text = " ".join(trained(row, world) or as_text(row.values, world) for row in rows)
    assert BEFORE not in text
    assert not inside or BEGUN not in text
    assert "The end of a" in text
    assert format == "preference" or "The end of b" in text


@pytest.mark.parametrize("inside", [False, True])
def test_a_fork_is_one_conversation_in_which_each_message_stands_once(world: World, inside: bool) -> None:
    (conversation,) = conversations(fork_of(world, "a", inside=inside, reward=1.0))
    messages = [(each.message["role"], each.message["content"], each.train) for each in conversation.recorded]
    assert messages == [
        ("user", "Who?", False),
        ("user", HINT, False),
        ("assistant", f"{BEFORE}.", False),
        ("user", "And?", False),
        ("assistant", f"{BEGUN}, so a.", not inside),
        ("user", "More?", False),
        ("assistant", "The end of a.", True),
    ]


def test_forks_of_one_call_are_a_pair_behind_its_conversation(world: World) -> None:
    (row,) = rows_of("preference", both(world, inside=False))
    assert [message["content"] for message in row.values["prompt"]] == ["Who?", HINT, f"{BEFORE}.", "And?"]
    assert "so a" in json.dumps(row.values["chosen"])
    assert "so b" in json.dumps(row.values["rejected"])


@pytest.mark.parametrize("inside", [False, True])
def test_trajectories_and_atif_mark_the_origin_as_context(world: World, inside: bool) -> None:
    item = fork_of(world, "a", inside=inside, reward=1.0)
    (row,) = rows_of("trajectories", [item])
    assert [turn["mask"] for turn in row.values["turns"]] == ["origin"] * (1 + inside) + ["", ""]
    assert BEFORE not in trained(row, world)
    (document,) = rows_of("atif", [item])
    steps = [step for step in document.values["steps"] if step["source"] == "agent"]
    assert [step.get("is_copied_context", False) for step in steps] == [True, inside, False]
