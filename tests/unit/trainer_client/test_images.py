"""Training with pixels: log-probs and gradients of packs equal those of transformers' own passes, row by row."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from rolltap.errors import AlignmentError, ConfigError
from rolltap.images import ImageReader, ImageRule
from rolltap.trainer_client.data.collate import collate
from rolltap.trainer_client.data.packing import Pack, PackedRow, Packer, shared_length
from rolltap.trainer_client.model.network import PolicyNetwork, load_model
from rolltap.trainer_client.model.weights import save_model
from rolltap.types import CallSpan, Segment

from ...vision import FAMILIES, data_url, picture, vision_folder, vision_model
from .making import model_folder

TALL, WIDE, BLUE = picture(60, 130), picture(150, 40), picture(60, 130, (10, 40, 250))


@pytest.fixture(scope="module", params=FAMILIES)
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder with random weights."""
    return vision_model(request.param, tmp_path_factory.mktemp("model"))


def row(
    reader: ImageReader, number: int, images: Sequence[bytes], ids: Sequence[int], tail: Sequence[int]
) -> PackedRow:
    """A row with text around images, and its last tokens with loss."""
    template = [5, 6, *(token for _ in images for token in (reader.rule.token, 11, 12)), *ids]
    read = [reader.read(data_url(image)) for image in images]
    whole, placed = reader.expanded(template, read) or ([], ())
    tokens = np.array([*whole, *tail], np.int32)
    mask = np.arange(len(tokens)) >= len(whole)
    zeros = np.zeros(len(tokens), np.float32)
    versions = np.where(mask, 0, -1).astype(np.int32)
    turns = (CallSpan("c", len(whole), len(tokens), trained=True, index=0),)
    segment = Segment(tokens, mask, zeros, versions, turns, images=placed)
    files = {hashlib.sha256(image).hexdigest(): image for image in images}
    return PackedRow.uniform(segment, number, number, 1.0 + number, 0.5, files=files)


def independent(folder: Path, model: Any, one: PackedRow) -> Tensor:
    """The log-probs of a row's trained tokens by transformers' own forward pass, M-RoPE and merging of images."""
    from transformers import AutoImageProcessor

    processor = AutoImageProcessor.from_pretrained(folder)
    ids = torch.from_numpy(one.token_ids.astype(np.int64))[None]
    more: dict[str, Any] = {}
    if one.segment.images:
        pictures = [Image.open(io.BytesIO(one.files[image.digest])).convert("RGB") for image in one.segment.images]
        if model.config.model_type == "internvl":
            tiles = processor(images=pictures, crop_to_patches=True, return_tensors="pt")["pixel_values"]
            more = {"pixel_values": tiles}
        else:
            more = {**processor(images=pictures, return_tensors="pt")}
            more["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **more).logits[0].float()
    trained = torch.from_numpy(np.flatnonzero(one.segment.loss_mask))
    return torch.log_softmax(logits[trained - 1], -1).gather(1, ids[0][trained][:, None])[:, 0]


def rows_of(reader: ImageReader) -> list[PackedRow]:
    text = [20 + at % 9 for at in range(20)]
    return [
        row(reader, 0, [TALL, WIDE], text, [31, 32, 33]),
        row(reader, 1, [TALL, WIDE], text, [31, 40]),
        row(reader, 2, [TALL, TALL], text, [31, 32]),
        row(reader, 3, [BLUE, WIDE], text, [31, 32]),
        row(reader, 4, [], text, [50, 51]),
    ]


@pytest.mark.parametrize("share", [False, True])
def test_packs_have_the_log_probs_and_gradients_of_rows_alone(seeing: Path, share: bool):
    reader = ImageReader(ImageRule.of(seeing))  # type: ignore[arg-type]
    made = rows_of(reader)
    policy = PolicyNetwork(load_model(seeing, torch.float32).train())
    packs = Packer(100_000, share=share)(made)
    loss: Any = 0.0
    logprobs: dict[int, Tensor] = {}
    for pack in packs:
        batch = collate(pack)
        predicted = policy(batch)
        loss = loss + (predicted.logprobs_M * batch.advantages_M).sum()
        for one in batch.rollouts_M.unique().tolist():
            logprobs[one] = predicted.logprobs_M[batch.rollouts_M == one].detach()
    loss.backward()
    alone = type(policy.model).from_pretrained(seeing, attn_implementation="eager")
    expected: Any = 0.0
    for one in made:
        values = independent(seeing, alone, one)
        torch.testing.assert_close(logprobs[one.rollout], values.detach(), atol=1e-4, rtol=1e-4)
        expected = expected + values.sum() * (1.0 + one.rollout)
    expected.backward()
    theirs = dict(alone.named_parameters())
    for name, weight in policy.model.named_parameters():
        assert weight.grad is not None, name
        gradient = theirs[name].grad
        assert gradient is not None
        off = float((weight.grad - gradient).abs().max() / gradient.abs().max().clamp(min=1e-3))
        assert off < 1e-3, (name, off)
    assert any(
        name.startswith(("model.visual", "model.vision")) and weight.grad.abs().max() > 1e-3
        for name, weight in policy.model.named_parameters()
    )
    if share:
        (pack,) = packs
        # Rows 0 and 1 share two; before row 2's first difference there is too little, but for a tiled image.
        assert len(pack.images) == (5 if policy.model.config.model_type == "internvl" else 6)
        assert len(pack) < sum(map(len, made))


def test_trunks_end_where_images_differ(tmp_path: Path):
    reader = ImageReader(ImageRule.of(vision_folder("qwen3_vl", tmp_path)))  # type: ignore[arg-type]
    first, same, second, other, _ = rows_of(reader)
    assert first.token_ids[: len(other) - 2].tolist() == other.token_ids[: len(other) - 2].tolist()
    assert shared_length(first, same) == len(first) - 2
    assert shared_length(first, other) == 0  # its first image is another: nothing worth sharing stands before
    assert shared_length(first, second) <= first.segment.images[1].start


def test_a_model_of_text_refuses_images_and_another_processor_is_noticed(seeing: Path, tmp_path: Path):
    reader = ImageReader(ImageRule.of(seeing))  # type: ignore[arg-type]
    (pack,) = Packer(1000)([row(reader, 0, [TALL], [7], [9])])
    with pytest.raises(ConfigError, match="show images"):
        PolicyNetwork(load_model(model_folder(tmp_path), torch.float32))(collate(pack))
    wrong = replace(pack.rows[0].segment.images[0], grid=(1, 2, 2 * pack.images[0].tokens))  # as many placeholders
    moved = replace(pack.rows[0], segment=replace(pack.rows[0].segment, images=(wrong,)))
    changed = Pack(pack.token_ids_N, pack.position_ids_N, pack.spans, (moved,), pack.places)
    with pytest.raises(AlignmentError, match="on record"):
        PolicyNetwork(load_model(seeing, torch.float32))(collate(changed))


def test_a_checkpoint_sees_as_the_model_did(seeing: Path, tmp_path: Path):
    """A run goes on from it, and engines are started with it."""
    save_model(load_model(seeing, torch.float32), None, tmp_path / "checkpoint", seeing)
    assert ImageRule.of(tmp_path / "checkpoint") == ImageRule.of(seeing) is not None
    assert load_model(tmp_path / "checkpoint", torch.float32).image_processor is not None
