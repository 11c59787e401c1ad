"""A token's bytes: joined, they are the bytes of the text, whatever the vocabulary."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from rolltap.engine.tiny import FOLDER
from rolltap.tokenizer import HubTokenizer

BYTE_LEVEL = HubTokenizer(FOLDER)


@given(st.text())
@example("三 \U0001f955 \u2028 <|im_end|>")
def test_the_bytes_of_the_tokens_are_the_texts(text: str) -> None:
    plain = BYTE_LEVEL.encode(BYTE_LEVEL.guard(text))
    assert b"".join(map(BYTE_LEVEL.token_bytes, plain)) == text.encode()


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> HubTokenizer:
    """A small vocabulary of Llama 2's kind: a space is a character of its own, an unknown character is its bytes."""
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "b", "\u2581a"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("\u2581", "a")], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.pre_tokenizer = pre_tokenizers.Split("\n", "isolated")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "x"}))
    return HubTokenizer(folder)


@pytest.mark.parametrize("text", [" a b", "a 三b", "\u2028", "<0x41>"])
def test_a_vocabulary_that_falls_back_on_bytes(byte_fallback: HubTokenizer, text: str) -> None:
    ids = byte_fallback.encode(text)
    assert b"".join(map(byte_fallback.token_bytes, ids)) == text.encode()
