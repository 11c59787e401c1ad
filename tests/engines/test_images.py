"""Images on a real vLLM: it makes the prompts that were planned, and its log-probs are those of the same pixels."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from rolltap.calllog.codec import part_hash
from rolltap.calllog.facts import CallRow

from ..vision import PROCESSORS, data_url, picture, vision_model
from .record import assert_extends, done, rows_of
from .servers import BASE, MODEL, Proxy, proxy, vllm

HEAD = 64
"""vLLM's attention on a CPU has no narrower heads."""


@pytest.fixture(scope="module", params=PROCESSORS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vision_model(request.param, tmp_path_factory.mktemp("model") / request.param, HEAD)


@pytest.fixture(scope="module")
def seeing(folder: Path, installed: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    flags = ("--model", str(folder), "--max-model-len", "1024", "--enable-scale-out")
    policies = f'[policies.{MODEL}]\nengine = "main"\ntokenizer = "{folder}"\n'
    with (
        vllm(tmp_path_factory.mktemp("vllm"), (*BASE, *flags, "--logprobs-mode", "processed_logprobs"), {}) as url,
        proxy(tmp_path_factory.mktemp("proxy"), url, policies) as running,
    ):
        yield running


def shown(text: str, *images: bytes) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": data_url(image)}} for image in images]
    return {"role": "user", "content": [{"type": "text", "text": text}, *parts]}


def test_a_conversation_with_images(seeing: Proxy, folder: Path) -> None:
    unit = 2 * PROCESSORS[folder.name]["patch_size"]
    red, blue = picture(5 * unit, 3 * unit), picture(2 * unit, 4 * unit, (10, 40, 250))
    wide, resized = picture(8 * unit, unit, kind="JPEG"), picture(150, 90, (20, 250, 70))
    turns = [
        shown("Look.", red),
        {"role": "user", "content": "And?"},
        shown("These.", blue, wide),
        shown("", red, resized),
    ]
    session = seeing.open_session(MODEL)
    history: list[Any] = []
    with closing(openai.OpenAI(base_url=session["base_url"] + "/v1", api_key=session["key"], max_retries=0)) as client:
        for number, turn in enumerate(turns):
            history.append(turn)
            (choice,) = client.chat.completions.create(
                model=MODEL, messages=history, max_tokens=12, stream=False, seed=number
            ).choices
            history.append(choice.message.model_dump(exclude_none=True))
    rows = rows_of(seeing.database, session["session_id"])
    assert [len(row.intent.images) for row in rows] == [1, 1, 3, 5]
    assert_extends(rows)
    files = {part_hash(image).hex(): image for image in (red, blue, wide, resized)}
    for row, atol in zip(rows, (1e-3, 1e-3, 1e-3, 2e-2), strict=True):  # torchvision and Pillow resize differently
        np.testing.assert_allclose(done(row).logprobs, reference(folder, row, files), rtol=0, atol=atol)


def reference(folder: Path, row: CallRow, files: Mapping[str, bytes]) -> np.ndarray:
    """The log-probs of a call's sampled tokens by transformers, in float32, with the images of its prompt."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    pictures = [Image.open(io.BytesIO(files[image.digest])).convert("RGB") for image in row.intent.images]
    pixels = AutoImageProcessor.from_pretrained(folder)(images=pictures, return_tensors="pt")
    ids = torch.tensor(np.concatenate([row.prompt_ids, done(row).output_ids]), dtype=torch.long)[None]
    kinds = (ids == model.config.image_token_id).int()
    with torch.inference_mode():
        logits_TV = model(ids, **pixels, mm_token_type_ids=kinds, use_cache=False).logits[
            0, len(row.prompt_ids) - 1 : -1
        ]
    logprobs_TV = torch.log_softmax(logits_TV, dim=-1).numpy()
    return np.take_along_axis(logprobs_TV, done(row).output_ids[:, None].astype(np.int64), 1)[:, 0]
