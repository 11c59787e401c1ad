"""Images in data sets: every format has them or skips the rollout and says why; TRL trains on `sft` with images."""

from __future__ import annotations

import base64
import hashlib
import io
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset, Image, List, load_dataset
from PIL import Image as Pictures

from rolltap.reconstructor.exporters import EXPORTERS, exporter_named
from rolltap.reconstructor.exporters.base import Container, ExportItem, Message
from rolltap.reconstructor.exporters.dataset import DatasetWriter, Query
from rolltap.types import PromptImage

from ...vision import data_url, picture, vision_model
from .world import World, says, system, user, without_tokens

RED, BLUE = picture(60, 60), picture(90, 60, (10, 40, 250), "JPEG")
HOLDS = {"trajectories"}
"""Formats that have images without being asked to."""


def image_part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def shown(message: Message, urls: Sequence[str]) -> Message:
    """A user's message with images before its text."""
    return {**message, "content": [*map(image_part, urls), {"type": "text", "text": message["content"]}]}


def seen(world: World, name: str, *, role: str = "user", urls: Sequence[str] = (), **changes: Any) -> ExportItem:
    """Two turns. The messages of `role` show an image each: the first one's is red, the second one's blue. `urls`:
    those in the messages, where these are others than the model's."""
    script = world.script(name)
    red, blue = (hashlib.sha256(file).hexdigest() for file in (RED, BLUE))
    start = [system("You look."), user(f"What is here, {name}?")]
    first = PromptImage(3, 5, (1, 2, 4), red)
    parent = script.ask(start, says("A red one."), images=(first,))
    at = len(script.calls[0].prompt_ids) + len(script.calls[0].output_ids) + 1
    second = [*start, says("A red one."), user("And here?")]
    script.ask(second, says("A blue one."), parent=parent, images=(first, PromptImage(at, at + 2, (1, 2, 4), blue)))
    known = urls or [data_url(RED), data_url(BLUE, "image/jpeg")]
    for call_id, text in script.texts.items():
        waiting = iter(known)
        messages = [shown(each, [next(waiting)]) if each["role"] == "user" else each for each in text.messages]
        messages = [{**each, "role": role} if each["role"] == "user" else each for each in messages]
        script.texts[call_id] = replace(text, messages=messages, tools=())
    return script.item(**changes)


def opened(file: bytes) -> Any:
    return Pictures.open(io.BytesIO(file))


def exported(
    out: Path, format: str, groups: Sequence[Sequence[ExportItem]], container: Container | None = None, **options: str
) -> tuple[dict[str, Any], bytes]:
    """The manifest, and the bytes of all files."""
    with DatasetWriter(out, exporter_named(format, options), Query(container=container)) as writer:
        for group in groups:
            writer.add(group)
        manifest = writer.finish()
    return manifest, b"".join((out / file["path"]).read_bytes() for file in manifest["files"])


def read(out: Path, manifest: dict[str, Any]) -> Dataset:
    """As a user loads the folder."""
    data = load_dataset(str(out), split="train", cache_dir=str(out.parent / "cache"))
    assert isinstance(data, Dataset)
    assert data.num_rows == manifest["rows"]
    return data


@pytest.mark.parametrize("tokens", [True, False])
@pytest.mark.parametrize("format", EXPORTERS)
def test_every_format_has_images_or_skips_the_rollout_and_says_why(
    format: str, tokens: bool, world: World, tmp_path: Path
) -> None:
    plain = [world.solved(f"p{at}", f"answer {at}").item(reward=float(at), task="p", group="p") for at in range(2)]
    made = [seen(world, f"s{at}", reward=float(at), task="s", group="s") for at in range(2)]
    made = made if tokens else list(map(without_tokens, made))
    for container in exporter_named(format).containers:
        alone, _ = exported(tmp_path / f"{container}-alone", format, [plain], container)
        both, data = exported(tmp_path / container, format, [plain, made], container)
        assert both["failed"]["count"] == 0
        assert alone["rows"]
        if tokens and format in HOLDS:
            assert both["rows"] == alone["rows"] + 2
            if container == "jsonl":
                assert all(hashlib.sha256(file).hexdigest().encode() in data for file in (RED, BLUE))
                assert all(base64.b64encode(file) in data for file in (RED, BLUE))
        else:
            assert both["rows"] == alone["rows"]
            new = {reason for reason, count in both["skipped"].items() if count > alone["skipped"].get(reason, 0)}
            wanted = ("images",) if tokens else ("images", "no tokens", "no conversation", "one run", "token")
            assert any(word in reason for reason in new for word in wanted), both["skipped"]


@pytest.mark.parametrize("container", ["jsonl", "parquet"])
@pytest.mark.parametrize("targets", ["weight", "whole", "split"])
@pytest.mark.parametrize("arguments", ["object", "text"])
def test_sft_has_a_column_of_images_with_their_places_in_the_messages(
    container: Container, targets: str, arguments: str, world: World, tmp_path: Path
) -> None:
    groups = [[seen(world, "seen")], [world.solved("plain", "other").item()]]
    options = {"images": "column", "targets": targets, "arguments": arguments}
    manifest, _ = exported(tmp_path / "out", "sft", groups, container, **options)
    assert (manifest["failed"]["count"], manifest["skipped"]) == (0, {})
    data = read(tmp_path / "out", manifest)
    if container == "parquet":
        assert data.features["images"] == List(Image())
    rows: list[dict[str, Any]] = [dict(row) for row in data]  # type: ignore[arg-type]
    numbers = [len(row["images"]) for row in rows]
    assert numbers == ([1, 2, 0, 0] if targets == "split" else [2, 0])
    for row in rows:
        messages = row["messages"] if targets != "split" else [*row["prompt"], *row["completion"]]
        parts = [part for message in messages for part in message["content"]]
        assert [part["type"] for part in parts].count("image") == len(row["images"])
        for given, file in zip(row["images"], (RED, BLUE), strict=False):
            image = (
                given if container == "parquet" else Pictures.open(io.BytesIO(base64.b64decode(given.split(",")[1])))
            )
            assert np.array_equal(np.asarray(image), np.asarray(opened(file)))
    first = rows[0]["prompt" if targets == "split" else "messages"]
    assert [part["type"] for part in first[1]["content"]] == ["image", "text"]
    assert first[1]["content"][1]["text"] == "What is here, seen?"
    called = rows[-1]["prompt" if targets == "split" else "messages"][2]
    given = called["tool_calls"][0]["function"]["arguments"]
    assert given == ({"command": "ls"} if arguments == "object" else '{"command": "ls"}')


@pytest.mark.parametrize(
    ("made", "why"),
    [
        ({"role": "tool"}, "a tool's result shows images"),
        ({"urls": ["https://example.com/a.png", data_url(BLUE)]}, "an image's file is not on record"),
        ({"urls": [data_url(BLUE), data_url(RED)]}, "an image that the model was not shown"),
    ],
)
def test_what_a_column_cannot_have_is_named(made: dict[str, Any], why: str, world: World, tmp_path: Path) -> None:
    manifest, _ = exported(tmp_path / "out", "sft", [[seen(world, "seen", **made)]], images="column")
    assert (manifest["rows"], manifest["skipped"]) == (0, {why: 1})


def test_rows_that_differ_in_an_image_alone_are_both_written(world: World, tmp_path: Path) -> None:
    items = [without_tokens(seen(world, "seen", urls=[data_url(RED), data_url(file)])) for file in (RED, BLUE, BLUE)]
    manifest, _ = exported(tmp_path / "out", "sft", [[item] for item in items], "parquet", images="column")
    assert (manifest["rows"], manifest["duplicates_left_out"]) == (2, 1)


@pytest.mark.filterwarnings("ignore")  # of transformers and TRL about themselves
@pytest.mark.parametrize("container", ["jsonl", "parquet"])
def test_trl_trains_the_replies_behind_their_images(container: Container, tmp_path: Path) -> None:
    """8 CPU seconds: TRL's trainer and collator on a random model of Qwen2.5-VL."""
    from transformers import AutoModelForImageTextToText, Qwen2_5_VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    class Seeing(Qwen2_5_VLProcessor):
        """Without videos, whose processor needs torchvision."""

        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return type(argument)

    folder = vision_model("qwen2_5_vl", tmp_path / "model")
    world = World(folder)
    items = [seen(world, "seen"), world.solved("plain").item(), seen(world, "other")]
    options = {"images": "column", "targets": "split", "arguments": "object"}
    manifest, _ = exported(tmp_path / "out", "sft", [[item] for item in items], container, **options)
    data = read(tmp_path / "out", manifest)
    images: Any = Qwen2VLImageProcessorPil.from_pretrained(folder)
    ends = {"eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    world.tokenizer.add_special_tokens(ends)
    processor = Seeing(images, world.tokenizer, images, chat_template=world.tokenizer.chat_template)
    settings: dict[str, Any] = {
        "output_dir": str(tmp_path / "trainer"), "max_steps": 2, "per_device_train_batch_size": 2, "report_to": "none",
        "use_cpu": True, "bf16": False, "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True,
        "dataloader_pin_memory": False, "gradient_checkpointing": False, "max_length": None,
    }  # fmt: skip
    model = AutoModelForImageTextToText.from_pretrained(folder)
    trainer = SFTTrainer(model=model, args=SFTConfig(**settings), train_dataset=data, processing_class=processor)
    said = []
    for batch in trainer.get_train_dataloader():
        trained = [[label for label in row if label != -100] for row in batch["labels"].tolist()]
        said += [world.tokenizer.decode(row) for row in trained]
        placeholders = int((batch["input_ids"] == model.config.image_token_id).sum())
        assert placeholders == int(batch["image_grid_thw"].prod(1).sum()) // 4 > 0
    seen_twice = [f"A {colour} one." for colour in ("blue", "blue", "red", "red")]
    assert sorted(said) == [f"{reply}<|im_end|>\n" for reply in (*seen_twice, "I look around.", "done")]
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 2
    assert all(map(math.isfinite, losses))
