"""A Llama of 31,000 weights as a GGUF file, as `examples/real-model` reads one: Q4_1 matrices, float32 norms.

Its vocabulary is bytes and what an agent's replies are made of, so that these fit the agent's limit of tokens.
"""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from rolltap.engine.tiny.tasks import SUBMIT

WIDTH, LAYERS, HEADS, KV_HEADS, INNER = 32, 2, 4, 2, 64
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write(path: Path) -> dict[str, np.ndarray]:
    """Writes the file; the weights in it by their GGUF names, as float32."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(4096)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    tokens, merges = _vocabulary()
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(
        [gguf.TokenType.CONTROL] * len(SPECIAL) + [gguf.TokenType.NORMAL] * (len(tokens) - len(SPECIAL))
    )
    writer.add_token_merges(merges)
    for add, name in (
        (writer.add_bos_token_id, "<|im_start|>"),
        (writer.add_eos_token_id, "<|im_end|>"),
        (writer.add_unk_token_id, "<|endoftext|>"),
        (writer.add_pad_token_id, "<|im_end|>"),
    ):
        add(tokens.index(name))
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    weights = {}
    for name, shape in _shapes(len(tokens)).items():
        weight = rng.normal(0.0, 0.1, shape).astype(np.float32)
        if len(shape) == 1:
            weight = 1 + weight
            writer.add_tensor(name, weight)
        else:
            packed = gguf.quants.quantize(weight, gguf.GGMLQuantizationType.Q4_1)
            writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
            weight = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q4_1)
        weights[name] = weight
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def _shapes(vocabulary: int) -> dict[str, tuple[int, ...]]:
    kv = WIDTH // HEADS * KV_HEADS
    layer = {
        "attn_norm": (WIDTH,),
        "ffn_norm": (WIDTH,),
        "attn_q": (WIDTH, WIDTH),
        "attn_k": (kv, WIDTH),
        "attn_v": (kv, WIDTH),
        "attn_output": (WIDTH, WIDTH),
        "ffn_gate": (INNER, WIDTH),
        "ffn_up": (INNER, WIDTH),
        "ffn_down": (WIDTH, INNER),
    }
    blocks = {f"blk.{at}.{name}.weight": shape for at in range(LAYERS) for name, shape in layer.items()}
    return {"token_embd.weight": (vocabulary, WIDTH), "output_norm.weight": (WIDTH,), **blocks}


def _vocabulary() -> tuple[list[str], list[str]]:
    """The tokens by their ids, and the merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=len(SPECIAL) + 256 + 64, special_tokens=list(SPECIAL), initial_alphabet=sorted(alphabet)
    )
    tokenizer.train_from_iterator([f"```bash\n{SUBMIT}\n```", "a.txt > b.txt"], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return sorted(model["vocab"], key=model["vocab"].get), [" ".join(pair) for pair in model["merges"]]
