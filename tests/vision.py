"""Models that see, small enough for a test: a folder with tokenizer, chat template and image processor; pictures."""

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
