"""What stands in the rows of each format, and that the published readers take them."""

from __future__ import annotations

import json
import re
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import atif
import numpy as np
import pytest
from datasets import load_dataset
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rolltap.reconstructor.exporters import EXPORTERS, exporter_named
from rolltap.reconstructor.exporters.base import Container, ExportItem
from rolltap.reconstructor.exporters.dataset import DatasetWriter, Query
from rolltap.types import Outcome, Reward

from . import readers
from .world import TOOLS, World, lines, reasons_of, rows_of, says, system, tool, user, without_tokens


def made(format: str, items: list[ExportItem], **options: str) -> list[dict[str, Any]]:
    return rows_of(list(exporter_named(format, options).rows(items)))


def loaded(path: Path, format: str, items: list[ExportItem], **query: Any) -> list[dict[str, Any]]:
    """The rows as Hugging Face's `datasets` reads it from the folder."""
    with DatasetWriter(path / "out", exporter_named(format), Query(**query)) as writer:
        for item in items:
            writer.add([item])
        manifest = writer.finish()
    kind = "parquet" if manifest["container"] == "parquet" else "json"
    files = [str(path / "out" / file["path"]) for file in manifest["files"]]
    dataset: Any = load_dataset(kind, data_files=files, split="train", cache_dir=str(path / "cache"))
    return list(dataset)


def sampled(item: ExportItem) -> list[int]:
    """Every sampled token of the session's trainable calls, in order."""
    trained = [call for call in item.calls.values() if call.kind == "main"]
    return [token for call in trained for token in call.output_ids.tolist()]


@pytest.mark.parametrize("container", ["parquet", "jsonl"])
def test_trajectories_hold_the_whole_record(container: Any, world: World, tmp_path: Path):
    item = world.with_subagent("s").item(reward=0.5, task="t")
    rows = loaded(tmp_path, "trajectories", [item], container=container)
    assert len(rows) == len(item.trajectory.segments) == 4
    for row, segment in zip(rows, item.trajectory.segments, strict=True):
        assert row["token_ids"] == segment.token_ids.tolist()
        assert row["loss_mask"] == segment.loss_mask.tolist()
        assert np.array_equal(np.asarray(row["logprobs"], np.float32), segment.logprobs)
        assert row["versions"] == segment.versions.tolist()
        assert (row["reward"], row["task_id"], row["kind"]) == (0.5, "t", segment.kind)
        turns = json.loads(row["turns"])  # a text in both, so that every release of `datasets` reads it
        assert [turn["call_id"] for turn in turns] == [turn.call_id for turn in segment.turns]
    trained = [token for row in rows for token, on in zip(row["token_ids"], row["loss_mask"], strict=True) if on]
    assert sorted(trained) == sorted(sampled(item))


def test_sft_has_the_conversation_with_its_tools(world: World, tmp_path: Path):
    item = world.solved("s").item()
    (row,) = loaded(tmp_path, "sft", [item])
    assert [message["role"] for message in row["messages"]] == [
        "system", "user", "assistant", "tool", "tool", "assistant",
    ]  # fmt: skip
    calls = row["messages"][2]["tool_calls"]
    assert [call["function"]["arguments"] for call in calls] == [{"command": "ls"}, {"path": "a.txt"}]
    assert row["messages"][2]["reasoning_content"] == "what is here?"
    assert json.loads(row["tools"]) == TOOLS
    (dropped,) = made("sft", [item], reasoning="drop")
    assert not any("reasoning_content" in message for message in dropped["messages"])


def test_sft_leaves_out_side_calls_and_keeps_each_agent(world: World):
    rows = made("sft", [world.with_subagent("s").item()])
    last = [row["messages"][-1]["content"] for row in rows]
    assert last == ["step two", "at the root", "step three"]


def test_a_session_without_tokens_still_has_its_conversations(world: World):
    script = world.script("text-only")
    first = script.ask([user("hi")], says("hello"), sampled="")
    script.ask([user("hi"), says("hello"), user("bye")], says("so long"), sampled="", parent=first)
    script.ask([user("other")], says("lost"), sampled="", outcome=Outcome.ABORTED)
    rows = made("sft", [script.item()])
    assert [[message["content"] for message in row["messages"]] for row in rows] == [["hi", "hello", "bye", "so long"]]
    assert reasons_of(list(exporter_named("sft-tokens").rows([script.item()]))) == ["no tokens that may be trained"]


def test_labelled_tokens_are_the_sampled_ones(world: World, tmp_path: Path):
    item = world.solved("s").item()
    (row,) = loaded(tmp_path, "sft-tokens", [item])
    assert row["input_ids"] == item.trajectory.segments[0].token_ids.tolist()
    assert [label for label in row["labels"] if label != -100] == sampled(item)
    assert all(label in (-100, token) for label, token in zip(row["labels"], row["input_ids"], strict=True))


def test_pairs_go_from_the_best_to_the_worst_of_a_group(world: World):
    rewards = {"a": 0.2, "b": 1.0, "c": 0.6, "d": 0.0}
    items = [world.solved(name, f"answer {name}").item(reward=r, task="t", group="g") for name, r in rewards.items()]
    rows = made("preference", items)
    pairs = [(row["chosen"][-1]["content"], row["rejected"][-1]["content"]) for row in rows]
    assert pairs == [("answer b", "answer d"), ("answer c", "answer a")]
    assert rows[0]["prompt"] == list(items[0].texts["a-0000"].messages)
    assert [message["role"] for message in rows[0]["chosen"]] == ["assistant", "tool", "tool", "assistant"]
    found = list(exporter_named("preference", {"margin": "0.5"}).rows(items))
    assert len(rows_of(found)) == 1
    assert reasons_of(found) == ["pair whose rewards don't differ by more than the margin"]


def test_pairs_need_one_conversation_and_one_beginning(world: World):
    broken = world.with_subagent("x").item(reward=1.0, task="t", group="g")
    other = world.script("y")
    other.ask([user("Something else.")], says("no"))
    items = [world.solved("a").item(reward=1.0, task="t", group="g"), other.item(reward=0.0, task="t", group="g")]
    found = list(exporter_named("preference").rows([*items, broken]))
    assert rows_of(found) == []
    assert reasons_of(found) == ["not one main conversation", "pair that doesn't begin alike"]


def flaky(world: World) -> list[ExportItem]:
    """Four rollouts with equal replies, rewarded 1, 0, 1, 0, and one with another reply."""
    items = [world.solved(f"s{number}").item(reward=float(number % 2), task="t", group="g") for number in range(4)]
    return [*items, world.solved("s4", answer="other").item(reward=1.0, task="t", group="g")]


def test_a_pair_of_equal_sides_is_skipped(world: World):
    found = list(exporter_named("preference").rows(flaky(world)[:4]))
    assert (rows_of(found), reasons_of(found)) == ([], ["pair whose sides are equal"] * 2)


def test_a_completion_with_both_labels_has_no_row(world: World):
    found = list(exporter_named("kto").rows(flaky(world)))
    assert [row["session_id"] for row in rows_of(found)] == ["s4"]
    assert reasons_of(found) == ["completion with both labels"] * 4


OUTCOMES = st.lists(
    st.lists(st.tuples(st.sampled_from(["x", "y", "z"]), st.sampled_from([0.0, 1.0])), min_size=2, max_size=5),
    min_size=1,
    max_size=3,
)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(groups=OUTCOMES, duplicates=st.booleans())
def test_no_rows_of_one_task_contradict_each_other(
    groups: list[list[tuple[str, float]]], duplicates: bool, world: World, tmp_path: Path
):
    """Groups of a task with few different replies, whose rewards follow nothing."""
    said = {answer: world.solved(answer, answer) for answer in "xyz"}
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    files = {}
    for format in ("preference", "kto"):
        query = Query(duplicates=duplicates)
        with DatasetWriter(folder / format, exporter_named(format, {"arguments": "object"}), query) as writer:
            for number, group in enumerate(groups):
                writer.add([said[one].item(reward=reward, task="t", group=f"g{number}") for one, reward in group])
            manifest = writer.finish()
        rows = [row for path in (folder / format).glob("*.jsonl") for row in lines(path)]
        assert not manifest["failed"]["count"]
        files[format] = rows, manifest
    rows, _ = files["preference"]
    pairs = [(row["chosen"][-1]["content"], row["rejected"][-1]["content"]) for row in rows]
    assert len({frozenset(pair) for pair in pairs}) == len(set(pairs))
    assert duplicates or len(set(pairs)) == len(pairs)
    assert all(chosen != rejected for chosen, rejected in pairs)
    rows, manifest = files["kto"]
    answers = [row["completion"][-1]["content"] for row in rows]
    labels = {(answer, row["label"]) for answer, row in zip(answers, rows, strict=True)}
    assert len(labels) == len(set(answers))
    assert duplicates or len(set(answers)) == len(answers)
    told = [{(answer, reward > 0) for answer, reward in group} for group in groups]
    flaky = sum(
        (answer, True) in told[at] and (answer, False) in told[at]
        for at, group in enumerate(groups)
        for answer, _ in group
    )
    later = sum(
        (answer, reward > 0) not in labels and (answer, reward <= 0) not in told[at]
        for at, group in enumerate(groups)
        for answer, reward in group
    )
    assert manifest["skipped"].get("completion with both labels", 0) == flaky
    assert manifest["skipped"].get("contradicts an earlier row", 0) == later


def test_kto_labels_by_threshold(world: World):
    items = [world.solved(f"s{r}", f"answer {r}").item(reward=r, task="t") for r in (0.0, 0.4, 1.0)]
    assert [row["label"] for row in made("kto", items)] == [False, True, True]
    assert [row["label"] for row in made("kto", items, threshold="0.5")] == [False, False, True]


def test_verl_rl_has_one_row_a_task_with_verls_columns(world: World, tmp_path: Path):
    items = [world.solved(f"s{i}", f"answer {i}").item(task=f"t{i % 2}") for i in range(4)]
    rows = loaded(tmp_path, "verl-rl", items)
    assert [row["extra_info"]["index"] for row in rows] == ["t0", "t1"]
    for row in rows:
        assert row.keys() == {"data_source", "prompt", "ability", "reward_model", "extra_info"}
        assert [message["role"] for message in row["prompt"]] == ["system", "user"]
        assert row["reward_model"] == {"style": "rule", "ground_truth": '{"kind": "command"}'}
    (named, *_) = made("verl-rl", items, agent="tool_agent")
    assert named["agent_name"] == "tool_agent"


def test_sharegpt_alternates_as_its_readers_demand(world: World, tmp_path: Path):
    item = world.solved("s").item()
    (row,) = loaded(tmp_path, "sharegpt", [item])
    turns = row["conversations"]
    assert [turn["from"] for turn in turns] == ["human", "function_call", "observation", "gpt"]
    words, _, calls = turns[1]["value"].removesuffix("</tool_call>").partition("\n<tool_call>")
    assert words == "<think>\nwhat is here?\n</think>\n\nI look around."
    assert [call["name"] for call in json.loads(calls)] == ["bash", "read"]
    assert json.loads(turns[2]["value"]) == ["a.txt", "text"]
    assert row["system"] == "You are an agent."
    assert [entry["name"] for entry in json.loads(row["tools"])] == ["bash", "read"]


def test_sharegpt_has_no_place_for_a_system_message_in_mid_conversation(world: World):
    script = world.script("s")
    start = [system("One."), system("Two."), user("hi")]
    script.ask(start, says("hello"))
    assert made("sharegpt", [script.item()])[0]["system"] == "One.\n\nTwo."
    later = world.script("later")
    later.ask([*start, says("hello"), system("Be brief."), user("bye")], says("so long"))
    found = list(exporter_named("sharegpt", {"targets": "split"}).rows([later.item()]))
    assert reasons_of(found) == ["a system message in mid-conversation"]


def test_atif_documents_pass_the_published_models(world: World, tmp_path: Path):
    item = world.with_subagent("s").item(reward=1.0, task="t")
    loaded(tmp_path, "atif", [world.solved("a").item(), item])
    lines = (tmp_path / "out" / "train-00000-of-00001.jsonl").read_text().splitlines()
    documents = [atif.Trajectory.model_validate_json(line) for line in lines]
    assert len(documents) == 3
    first = documents[0]
    agent_steps = [step for step in first.steps if step.source == "agent"]
    assert [step.message for step in agent_steps] == ["I look around.", "done"]
    assert agent_steps[0].observation is not None
    assert [result.content for result in agent_steps[0].observation.results] == ["a.txt", "text"]
    continued = documents[1]
    assert continued.continued_trajectory_ref == documents[2].trajectory_id
    assert continued.subagent_trajectories is not None
    assert [step.message for step in continued.subagent_trajectories[0].steps if step.source == "agent"] == [
        "", "at the root",
    ]  # fmt: skip
    assert continued.extra is not None
    assert continued.extra["reward"] == 1.0


def test_atif_of_a_model_that_is_only_relayed_has_its_counts_and_no_tokens(world: World):
    item = without_tokens(world.with_subagent("s").item())
    usage = {"prompt": 7, "output": 3, "cached": 2, "reasoning": 1}
    texts = {id: replace(text, sampling={"model": "gpt"}, usage=usage) for id, text in item.texts.items()}
    documents = [atif.Trajectory.model_validate(each) for each in made("atif", [replace(item, texts=texts)])]
    replies = [[step.message for step in each.steps if step.source == "agent"] for each in documents]
    assert replies == [["step one", "step two"], ["step three"]]
    assert [each.continued_trajectory_ref for each in documents] == [documents[1].trajectory_id, None]
    helpers = documents[0].subagent_trajectories or []
    assert len(helpers) == 1
    for document in (*documents, *helpers):
        sampled = [step for step in document.steps if step.source == "agent"]
        counts = {"prompt_tokens": 7, "completion_tokens": 3, "cached_tokens": 2}
        assert {step.model_name for step in sampled} == {document.agent.model_name} == {"gpt"}
        assert all(step.metrics and step.metrics.model_dump(exclude_none=True) == counts for step in sampled)
        assert document.final_metrics is not None
        assert document.final_metrics.total_completion_tokens == 3 * len(sampled)


def test_atif_metrics_are_the_engines_tokens(world: World):
    item = world.solved("s").item()
    (document,) = made("atif", [item])
    found = [step["metrics"] for step in document["steps"] if step["source"] == "agent"]
    for metrics, call in zip(found, item.calls.values(), strict=True):
        assert np.array_equal(metrics["prompt_token_ids"], call.prompt_ids)
        assert np.array_equal(metrics["completion_token_ids"], call.output_ids)
        assert np.array_equal(metrics["logprobs"], call.logprobs)


def test_transitions_discount_what_comes_later(world: World):
    item = world.solved("s").item(reward=1.0)
    parts = (("r2", 0.25, "call:s-0000"), ("r3", 0.25, "span:s-0000:0:2"), ("r4", 9.0, "role:s-0000"))
    rewards = (*item.rewards, *(Reward(id, "s", value, scope=scope) for id, value, scope in parts))
    (script,) = [world.solved("s").item(reward=1.0, rewards=rewards)]
    rows = made("transitions", [script], gamma="0.5")
    assert [row["reward"] for row in rows] == [0.5, 1.0]
    assert [row["return_to_go"] for row in rows] == [1.0, 1.0]
    assert [row["done"] for row in rows] == [False, True]
    assert np.array_equal(rows[1]["output_ids"], item.calls["s-0001"].output_ids)


def test_harbor_details_are_lists_of_equal_length_with_the_main_agent_first(world: World, tmp_path: Path):
    """The keys and shapes of Harbor's `RolloutDetail` (a TypedDict; Harbor itself needs a newer Python)."""
    item = world.with_subagent("s").item()
    (row,) = loaded(tmp_path, "harbor", [item])
    details = row["rollout_details"]
    assert all(detail.keys() == {"prompt_token_ids", "completion_token_ids", "logprobs", "extra"} for detail in details)
    for detail in details:
        turns = len(detail["prompt_token_ids"])
        assert turns == len(detail["completion_token_ids"]) == len(detail["logprobs"])
        assert turns == len(detail["extra"]["weight_versions"])
        assert [len(ids) for ids in detail["completion_token_ids"]] == [len(lps) for lps in detail["logprobs"]]
    assert details[0]["prompt_token_ids"][0] == item.calls["s-0000"].prompt_ids.tolist()
    together = [token for detail in details for ids in detail["completion_token_ids"] for token in ids]
    assert sorted(together) == sorted(sampled(item))


def test_rendering_formats_count_the_rows_whose_tokens_are_not_the_sampled_ones(world: World, tmp_path: Path):
    plain = world.script("plain")
    plain.ask([user("hi")], says("hello"))
    spaced = world.script("spaced")
    odd = '<think>\n\n</think>\n\n<tool_call>\n{"name":"bash","arguments":{"command":"ls"}}\n</tool_call><|im_end|>'
    spaced.ask([user("hi")], says("", ("c", "bash", {"command": "ls"})), sampled=odd)
    answered = [user("hi"), says("", ("c", "bash", {"command": "ls"})), tool("c", "x")]
    spaced.ask(answered, says("ok"), parent="spaced-0000")

    def differs(rendered: Any) -> bool:
        ids = world.ids(world.render(rendered.messages))
        return ids[: len(rendered.token_ids)] != rendered.token_ids.tolist()

    with DatasetWriter(tmp_path / "out", exporter_named("sft"), Query(), differs=differs) as writer:
        for script in (plain, spaced):
            writer.add([script.item()])
        manifest = writer.finish()
    assert not manifest["token_faithful"]
    assert "need not be the sampled ones" in manifest["note"]
    assert manifest["rerendered"] == {"rows": 2, "differ": 1}


@pytest.mark.parametrize("container", ["jsonl", "parquet"])
@pytest.mark.parametrize(("format", "column"), [("sft", "messages"), ("kto", "completion"), ("preference", "chosen")])
def test_tool_arguments_are_objects_in_every_container(
    format: str, column: str, container: Any, world: World, tmp_path: Path
):
    """Templates of several families (Qwen3.5, GLM) walk through the arguments of a call."""
    items = [world.solved(name, name).item(reward=r, task="t", group="g") for name, r in (("a", 1.0), ("b", 0.0))]
    with DatasetWriter(tmp_path / "out", exporter_named(format), Query(container=container)) as writer:
        writer.add(items)
        files = [str(tmp_path / "out" / file["path"]) for file in writer.finish()["files"]]
    kind = "json" if container == "jsonl" else container
    rows: Any = load_dataset(kind, data_files=files, split="train", cache_dir=str(tmp_path / "cache"))
    called = next(message for message in rows[0][column] if message.get("tool_calls"))
    assert called["tool_calls"][0]["function"]["arguments"] == {"command": "ls"}


def test_an_empty_dataset_says_so_when_it_is_loaded(tmp_path: Path) -> None:
    with DatasetWriter(tmp_path / "out", exporter_named("sft"), Query()) as writer:
        writer.finish()
    with pytest.raises(FileNotFoundError, match="data files"):  # and the manifest is not taken for its row
        load_dataset(str(tmp_path / "out"), split="train", cache_dir=str(tmp_path / "cache"))


def test_a_message_with_an_image_is_no_row_of_parquet(world: World, tmp_path: Path):
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    script = world.solved("seen")
    for call_id, text in script.texts.items():
        content = [{"type": "text", "text": "Look."}, image]
        shown = [{**each, "content": content} if each["role"] == "user" else each for each in text.messages]
        script.texts[call_id] = replace(text, messages=shown)
    containers: dict[Container, int] = {"jsonl": 2, "parquet": 1}
    manifest: dict[str, Any] = {}
    for container, rows in containers.items():
        exporter = exporter_named("sft", {"images": "parts"})
        with DatasetWriter(tmp_path / container, exporter, Query(container=container)) as writer:
            for item in (world.solved("plain", "other").item(), script.item()):
                writer.add([item])
            manifest = writer.finish()
        assert manifest["rows"] == rows
    reason = "RowError: content with images does not fit Parquet; use --container jsonl"
    assert manifest["failed"]["rows"] == [{"session_id": "seen", "row": 0, "reason": reason}]


@pytest.mark.parametrize("format", [name for name in EXPORTERS if name != "slime"])  # its files are torch's
def test_every_file_loads_with_datasets(format: str, world: World, tmp_path: Path) -> None:
    items = [world.solved(f"s{i}", f"answer {i}").item(reward=float(i), task="t", group="g") for i in range(2)]
    for container in exporter_named(format).containers:
        out = tmp_path / container
        with DatasetWriter(out, exporter_named(format), Query(container=container)) as writer:
            writer.add(items)
            rows = writer.finish()["rows"]
        assert rows
        assert load_dataset(str(out), split="train", cache_dir=str(tmp_path / "cache")).num_rows == rows


def test_the_docs_table_is_made_of_the_tests() -> None:
    text = readers.PAGE.read_text(encoding="utf-8")
    assert text == readers.page(text), "python -m tests.unit.exporters.readers"
    assert set(readers.ROWS) == set(readers.READERS) == set(EXPORTERS)
    for tests in readers.READERS.values():
        for _, file, test in tests:
            code = (Path(__file__).parent / file).read_text(encoding="utf-8")
            assert re.search(rf"^(async )?def {test}\(", code, re.MULTILINE), (file, test)
