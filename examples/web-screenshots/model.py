"""Writes a random Qwen2.5-VL to `model/`, small enough for a CPU: weights, tokenizer, chat template, image processor.

In its place in earnest: the folder of a Qwen2.5-VL or Qwen3-VL, which has all of these.
"""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from rolltap.engine.tiny import FOLDER

OUT = Path("model")
TOKENS = {
    "vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>",
}  # fmt: skip
TEMPLATE = """\
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{ message.content }}
{%- else %}{%- for part in message.content %}
{%- if part.type == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}{%- else %}{{ part.text }}{%- endif %}
{%- endfor %}{%- endif %}{{ '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"""
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14, "merge_size": 2, "min_pixels": 56 * 56,
    "max_pixels": 224 * 168, "image_mean": [0.4815, 0.4578, 0.4082], "image_std": [0.2686, 0.2613, 0.2758],
}  # fmt: skip

tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in TOKENS.values()])
config = json.loads((FOLDER / "tokenizer_config.json").read_text(encoding="utf-8"))
text: dict[str, Any] = {
    "vocab_size": tokenizer.get_vocab_size(), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096,
    "bos_token_id": None, "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 1, 1]},
}  # fmt: skip
vision: dict[str, Any] = {"hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 24, "depth": 2, "num_heads": 2}
ids: dict[str, Any] = {name: tokenizer.token_to_id(token) for name, token in TOKENS.items()}
torch.manual_seed(0)
model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids))
model.save_pretrained(OUT)
tokenizer.save(str(OUT / "tokenizer.json"))
(OUT / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}), encoding="utf-8")
(OUT / "preprocessor_config.json").write_text(json.dumps(PROCESSOR), encoding="utf-8")
