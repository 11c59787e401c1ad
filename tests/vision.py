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
from rolltap.images import ImageRule

from .families.families import trl_templates

VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
NORM = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
"""As published folders name it: vLLM normalises by what it finds there, transformers has these by default."""

PROCESSORS: Mapping[str, dict[str, Any]] = {
    "qwen2_5_vl": {"patch_size": 14, "min_pixels": 56 * 56, "max_pixels": 140 * 140},
    "qwen3_vl": {"patch_size": 16, "size": {"shortest_edge": 64 * 64, "longest_edge": 160 * 160}},
}
"""The image processors of the families with Qwen2-VL's rule, with limits that keep prompts short."""

TILES = {"size": {"height": 56, "width": 56}, "min_patches": 1, "max_patches": 4}
FAMILIES = (*PROCESSORS, "internvl")
TILE_TOKENS = ("<img>", "</img>", "<IMG_CONTEXT>", "<video>")
TILED_TEMPLATE = """{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}\
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}\
{% if part.type == 'image' %}{{ '<IMG_CONTEXT>\\n' }}{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}\
{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""As InternVL3's own folders in transformers' format write it."""


def vision_folder(family: str, folder: Path) -> Path:
    """A model's folder without weights. `family` is also the name of a chat template of trl's."""
    folder.mkdir(parents=True, exist_ok=True)
    if family == "internvl":
        return _tiled_folder(folder)
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in VISION_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((FOLDER / "tokenizer_config.json").read_text())
    config["chat_template"] = (trl_templates() / f"{family}.jinja").read_text()
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    processor = {"image_processor_type": "Qwen2VLImageProcessor", "merge_size": 2, **NORM, **PROCESSORS[family]}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def _tiled_folder(folder: Path) -> Path:
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in TILE_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((FOLDER / "tokenizer_config.json").read_text())
    names = ("start_image_token", "end_image_token", "context_image_token", "video_token")
    config |= {"chat_template": TILED_TEMPLATE, **dict(zip(names, TILE_TOKENS, strict=True))}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    processor = {
        "image_processor_type": "GotOcr2ImageProcessor", "processor_class": "InternVLProcessor",
        "crop_to_patches": False, **NORM, **TILES,
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    settings = {"processor_class": "InternVLProcessor", "image_seq_length": 4}
    (folder / "processor_config.json").write_text(json.dumps(settings))
    return folder


def _tiled_model(folder: Path, text: dict[str, Any], token: int) -> Any:
    from transformers import InternVLConfig, InternVLForConditionalGeneration

    seen = {
        "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24, "num_hidden_layers": 2,
        "image_size": [56, 56], "patch_size": [14, 14],
    }  # fmt: skip
    text = {**text, "model_type": "qwen2", "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}
    config = InternVLConfig(
        text_config=text, vision_config=seen, image_token_id=token, image_seq_length=4, tie_word_embeddings=False
    )
    return InternVLForConditionalGeneration(config)


def vision_model(family: str, folder: Path, head: int = 8) -> Path:
    """`vision_folder` with random weights; all sections of rotary positions matter. `head`: the width of a head."""
    import torch
    from transformers import (
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        Qwen3VLConfig,
        Qwen3VLForConditionalGeneration,
    )

    torch.manual_seed(0)
    rule = ImageRule.of(vision_folder(family, folder))
    assert rule is not None
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    ids: dict[str, Any] = {name: rule.token - 2 + at for at, name in enumerate(names)}
    sections = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [head // 4, head // 8, head // 8]}
    text: dict[str, Any] = {
        "vocab_size": tokenizer.get_vocab_size(), "hidden_size": 4 * head, "intermediate_size": 48,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
        "rope_parameters": sections, "bos_token_id": None, "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
    }  # fmt: skip
    seen: dict[str, Any] = {
        "hidden_size": 2 * head, "out_hidden_size": 4 * head, "num_heads": 2, "intermediate_size": 24,
    }  # fmt: skip
    model: Any
    if family == "internvl":
        model = _tiled_model(folder, text, rule.token)
    elif family == "qwen2_5_vl":
        seen |= {"depth": 2, "fullatt_block_indexes": [1], "window_size": 56}
        model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=seen, **ids))
    else:
        seen |= {"depth": 3, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
        text["rope_parameters"]["mrope_interleaved"] = True  # transformers knows; vLLM reads it
        config = Qwen3VLConfig(text_config={**text, "head_dim": head}, vision_config=seen, **ids)
        model = Qwen3VLForConditionalGeneration(config)
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
