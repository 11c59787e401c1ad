"""Models that see, small enough for a test: a folder with tokenizer, chat template, image processor and, if wanted,
random weights; pictures."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image
from tokenizers import AddedToken, Tokenizer

from rolltap.engine.tiny import FOLDER
from rolltap.images import ImageRule

from .families.families import trl_templates

VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
PROCESSORS: Mapping[str, dict[str, Any]] = {
    "qwen2_5_vl": {"patch_size": 14, "min_pixels": 56 * 56, "max_pixels": 140 * 140},
    "qwen3_vl": {"patch_size": 16, "size": {"shortest_edge": 64 * 64, "longest_edge": 160 * 160}},
}
"""The image processors of the families, with limits that keep prompts short."""


def vision_folder(family: str, folder: Path) -> Path:
    """A model's folder without weights. `family` is also the name of a chat template of trl's."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in VISION_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((FOLDER / "tokenizer_config.json").read_text())
    config["chat_template"] = (trl_templates() / f"{family}.jinja").read_text()
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    processor = {"image_processor_type": "Qwen2VLImageProcessor", "merge_size": 2, **PROCESSORS[family]}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


TEXT: dict[str, Any] = {
    "vocab_size": 1040, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
VISION: dict[str, Any] = {"hidden_size": 16, "out_hidden_size": 32, "num_heads": 2, "intermediate_size": 24}


def vision_model(family: str, folder: Path) -> Path:
    """A model's folder with random weights, and sections of rotary positions that all matter."""
    import torch
    import transformers

    vision_folder(family, folder)
    rule = ImageRule.of(folder)
    assert rule is not None
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    ids: dict[str, Any] = {name: rule.token - 2 + at for at, name in enumerate(names)}
    rope = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 1, 1]}
    model: Any
    torch.manual_seed(0)
    if family == "qwen2_5_vl":
        seeing = {**VISION, "depth": 2, "fullatt_block_indexes": [1], "window_size": 56}
        text = {**TEXT, "rope_parameters": rope}
        config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=seeing, **ids)
        model = transformers.Qwen2_5_VLForConditionalGeneration(config)
    else:
        seeing = {**VISION, "depth": 3, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
        text = {**TEXT, "head_dim": 8, "rope_parameters": rope}
        model = transformers.Qwen3VLForConditionalGeneration(
            transformers.Qwen3VLConfig(text_config=text, vision_config=seeing, **ids)
        )
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.2)
    model.save_pretrained(folder)
    return folder


def picture(
    width: int, height: int, colour: tuple[int, ...] = (200, 30, 90), kind: str = "PNG", **options: Any
) -> bytes:
    """An image's file, with a gradient, so that no two places look alike."""
    image = Image.new("RGB", (width, height), colour)
    image.putdata(
        [((x * 7 + colour[0]) % 256, (y * 5 + colour[1]) % 256, colour[2]) for y in range(height) for x in range(width)]
    )
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


def data_url(image: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(image).decode()}"
