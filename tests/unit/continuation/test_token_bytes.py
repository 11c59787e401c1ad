"""A token's bytes: joined, they are the bytes of the text, whatever the vocabulary."""

from __future__ import annotations

import json
from itertools import pairwise
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


IDS = st.lists(st.integers(0, BYTE_LEVEL._size + 3), max_size=40)


@given(IDS, st.lists(st.integers(0, 40), max_size=10))
@example(BYTE_LEVEL.encode("三 \U0001f955 \u2028 <|im_end|>"), [])
@example(BYTE_LEVEL.encode("\U0001f955\U0001f955"), list(range(20)))
def test_ids_that_come_one_after_the_other_have_the_text_of_all(ids: list[int], cuts: list[int]) -> None:
    """Ids of any kind: halves of characters, bytes that are none, ids that are no token."""
    stream = BYTE_LEVEL.text_stream()
    assert stream is not None
    edges = sorted({0, len(ids), *(cut for cut in cuts if cut < len(ids))})
    pieces = [stream.feed(ids[start:end]) for start, end in pairwise(edges)]
    assert "".join([*pieces, stream.feed([], is_last=True)]) == BYTE_LEVEL.decode(ids)


def test_no_half_of_a_character_is_given_out() -> None:
    stream, ids = BYTE_LEVEL.text_stream(), BYTE_LEVEL.encode("a\U0001f955b")
    assert stream is not None
    assert len(ids) > 3
    assert "".join(filter(None, (stream.feed([id]) for id in ids))) == "a\U0001f955b"


def test_an_added_token_is_text_as_the_library_reads_it(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(Path(FOLDER) / "tokenizer.json"))
    tokenizer.add_tokens(["caf\u00e9", "two words", "\u00e9", "line\nbreak", "\u4e09"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "x"}))
    added = HubTokenizer(tmp_path)
    stream, ids = added.text_stream(), sorted(added.added_tokens)
    assert stream is not None
    assert stream.feed(ids, is_last=True) == added.decode(ids)


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


def test_a_text_that_depends_on_the_tokens_before_it_is_no_stream(byte_fallback: HubTokenizer) -> None:
    assert byte_fallback.text_stream() is None


@pytest.mark.parametrize("text", [" a b", "a 三b", "\u2028", "<0x41>"])
def test_a_vocabulary_that_falls_back_on_bytes(byte_fallback: HubTokenizer, text: str) -> None:
    ids = byte_fallback.encode(text)
    assert b"".join(map(byte_fallback.token_bytes, ids)) == text.encode()
