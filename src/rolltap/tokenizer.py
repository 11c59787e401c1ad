"""Loads a Hugging Face `tokenizer.json` without transformers, and keeps text from injecting special tokens.

`guard` marks every special-token literal in a text that a person or a tool wrote. `encode` encodes marked literals as
ordinary text, so a user who types `<|im_end|>` does not end the turn. The beginning of a literal at a text's end is
marked too, as a template may append the rest of it (`<parameter=` and `>` around a name).
"""

from __future__ import annotations

import codecs
import hashlib
import json
import re
import threading
from array import array
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from sys import getsizeof
from typing import Any

from cachetools import LRUCache

from rolltap.errors import ConfigError
from rolltap.extras import install_line

GUARD = "\ufdd0"
"""A Unicode non-character, which should not occur in text. `guard` doubles one that does."""

BLANKS = " \t\n\r\u2581"
"""White space, and the character for a space in some vocabularies."""

CACHED_BYTES = 16_000_000
"""Limit of the cache of encoded texts. System prompts and tools recur in every rollout, and a history after every
break. Threads share this cache, so it is not part of the common cache limit."""

CACHED_BYTES_EACH = 400
"""Estimated bytes of a cache entry, without its characters and ids."""


BYTE_PIECE = re.compile(r"<0x(?P<hex>[0-9A-Fa-f]{2})>")
"""The token of a byte in a vocabulary that falls back on bytes."""


def _byte_characters() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for: GPT-2's table, which shifts the bytes that
    are no printable character of Latin-1."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


BYTE_OF = _byte_characters()


def read_tokenizer(folder: Path) -> tuple[str, dict[str, Any]]:
    """`tokenizer.json` as text and `tokenizer_config.json` parsed; `ConfigError` if one can't be read."""
    try:
        text = (folder / "tokenizer.json").read_text(encoding="utf-8")
        return text, json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        lacks = f"it has no {Path(error.filename).name}" if folder.is_dir() else "there is no such folder"
        hint = download_hint(folder) or "; name the folder that the model was downloaded to"
        raise ConfigError(f"cannot read the tokenizer folder {str(folder)!r}: {lacks}{hint}") from error
    except OSError as error:
        raise ConfigError(f"cannot read the tokenizer folder {str(folder)!r}: {error}") from error


class HubTokenizer:
    """The tokenizer of a model folder (`tokenizer.json`, `tokenizer_config.json`).

    It has the methods that the `renderers` package calls. `hash` identifies vocabulary, merges and chat template;
    engine, proxy and trainer compare it at start.
    """

    unk_token_id: int | None = None

    def __init__(self, folder: str | Path) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise ConfigError(f"token mode needs {error.name}: {install_line('tokens')}") from error
        root = Path(folder)
        text, self.config = read_tokenizer(root)
        self.name_or_path = str(folder)
        self._tokenizer = Tokenizer.from_str(text)
        self._cache: LRUCache[str, tuple[array[int], int]] = LRUCache(CACHED_BYTES, getsizeof=lambda entry: entry[1])
        self._cache_lock = threading.Lock()  # long texts are encoded in threads
        self.chat_template = self._read_template(root)
        added = self._tokenizer.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        decoder = json.loads(self._tokenizer.decoder.__getstate__()) if self._tokenizer.decoder is not None else {}
        self._decoders = {part["type"] for part in (decoder, *decoder.get("decoders", ())) if "type" in part}
        special = {token_id: token for token_id, token in added.items() if not self._is_text(token)}
        self.special_ids = frozenset(special)
        """The added tokens that are not text. Gemma also adds line breaks and HTML tags, which are text."""
        self._plain = _copy_with(
            [token for token_id, token in added.items() if token_id not in special], self._tokenizer
        )
        literals = sorted((token.content for token in special.values()), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, literals)) or r"(?!)")
        firsts = (f"{re.escape(literal[0])}(?={re.escape(literal[1:])})" for literal in literals if literal)
        self._starts = re.compile("|".join(firsts) or r"(?!)")  # finds a literal inside another one too
        self._special_starts = tuple({literal[0] for literal in literals if literal})
        self._beginnings = frozenset(literal[:size] for literal in literals for size in range(1, len(literal)))
        self._longest = max(map(len, literals), default=0)
        end = self.config.get("eos_token")
        end = end.get("content") if isinstance(end, dict) else end
        self.eos_token_id = self._tokenizer.token_to_id(end) if end else None
        known = self._tokenizer.id_to_token
        self.end_token_ids = tuple(end for end in _read_end_tokens(root) if end >= 0 and known(end) is not None)
        """The tokens that end a reply by the model's `generation_config.json`; empty without one."""
        ids = set(self._tokenizer.get_vocab(with_added_tokens=True).values())
        self._size = next(number for number in range(len(ids) + 1) if number not in ids)  # all ids below are tokens
        self._pieces = TokenPieces(self._tokenizer.id_to_token)
        self.hash = hashlib.sha256(f"{text}\0{self.chat_template}".encode()).hexdigest()

    @property
    def hashes(self) -> dict[str, str]:
        """The tokenizer's hashes for a dataset's manifest."""
        template = hashlib.sha256(self.chat_template.encode()).hexdigest()
        return {"hash": self.hash, "template_hash": template}

    def _read_template(self, root: Path) -> str:
        path = root / "chat_template.jinja"
        if path.exists():
            return path.read_text(encoding="utf-8")
        template = self.config.get("chat_template") or ""
        if isinstance(template, list):
            named = {entry["name"]: entry["template"] for entry in template}
            template = named.get("tool_use") or named.get("default") or ""
        return template

    @property
    def added_tokens(self) -> dict[int, str]:
        """The literals of all added tokens, by id."""
        return self._added

    def encode_as_is(self, text: str) -> list[int]:
        """The ids of `text` as servers encode it: literals of added tokens become these."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def _is_text(self, token: Any) -> bool:
        """Whether an added token is ordinary text: in the model's vocabulary and not used by the chat template."""
        if token.special or self._tokenizer.model.token_to_id(token.content) is None:
            return False
        return not token.content.strip(BLANKS) or token.content not in self.chat_template

    def guard(self, text: str) -> str:
        """Marks the special-token literals in `text`, and the beginning of one at its end, as ordinary text."""
        if GUARD not in text and not any(start in text for start in self._special_starts):
            return text
        doubled = text.replace(GUARD, GUARD * 2) if GUARD in text else text
        end = len(doubled.rstrip())
        unfinished = (at for at in range(max(0, end - self._longest), end) if doubled[at:end] in self._beginnings)
        starts = {match.start() for match in self._starts.finditer(doubled)}.union(unfinished)
        edges = [0, *sorted(at + 1 for at in starts), len(doubled)]
        return GUARD.join(doubled[begin:end] for begin, end in pairwise(edges))

    def encode(self, text: str, add_special_tokens: bool = False, **_: Any) -> list[int]:
        """The ids of `text`. Literals that `guard` marked are encoded as ordinary text."""
        if add_special_tokens:
            return self._encode(text, add_special_tokens=True)
        with self._cache_lock:
            cached = self._cache.get(text)
        if cached is not None:
            return cached[0].tolist()
        ids = self._encode(text)
        size = CACHED_BYTES_EACH + getsizeof(text) + 4 * len(ids)
        if size < CACHED_BYTES // 4:
            with self._cache_lock:
                self._cache[text] = (array("i", ids), size)
        return ids

    def _encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        if GUARD not in text:
            return _ids(self._tokenizer, text, add_special_tokens=add_special_tokens)
        ids: list[int] = []
        position = 0
        for match in self._special.finditer(text):
            ids += self._encode_plain(text[position : match.start()])
            ids += _ids(self._tokenizer, match[0])
            position = match.end()
        return ids + self._encode_plain(text[position:])

    def _encode_plain(self, text: str) -> list[int]:
        unguarded = re.sub(f"{GUARD}({GUARD})?", r"\1", text)
        return _ids(self._plain, unguarded) if unguarded else []

    def decode(self, token_ids: Sequence[int] | int, skip_special_tokens: bool = False, **_: Any) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def text_stream(self) -> TextStream | None:
        """A decoder of ids that come one after the other; None if a token's text depends on the tokens before it."""
        return TextStream(self._pieces) if self._decoders - {"Sequence"} == {"ByteLevel"} else None

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        if isinstance(tokens, str):
            return self._tokenizer.token_to_id(tokens)
        return [self._tokenizer.token_to_id(token) for token in tokens]

    def lacks(self, token_ids: Sequence[int]) -> bool:
        """Whether some id is no token: a model's embedding is often longer than its vocabulary."""
        if not token_ids or max(token_ids) < self._size:
            return False
        return any(token_id >= self._size and self._tokenizer.id_to_token(token_id) is None for token_id in token_ids)

    def token(self, token_id: int) -> str:
        """One token as text, for log-prob listings."""
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """One token's bytes, maybe a part of a character. Those of a text's tokens, joined, are the text's."""
        added = self._added.get(token_id)
        if added is not None:
            return added.encode()
        piece = self._tokenizer.id_to_token(token_id) or ""
        if "ByteLevel" in self._decoders:
            return bytes(BYTE_OF[character] for character in piece if character in BYTE_OF)
        if "ByteFallback" in self._decoders and (byte := BYTE_PIECE.fullmatch(piece)):
            return bytes.fromhex(byte["hex"])
        if self._decoders & {"Replace", "Metaspace"}:
            return piece.replace("\u2581", " ").encode()
        return self.token(token_id).encode()


class TokenPieces(dict[int, bytes]):
    """The bytes of the tokens that were sampled, by id, as the library's decoder of byte levels has them."""

    def __init__(self, piece_of: Callable[[int], str | None]) -> None:
        super().__init__()
        self._piece_of = piece_of

    def __missing__(self, token_id: int) -> bytes:
        piece = self._piece_of(token_id) or ""
        try:
            data = bytes([BYTE_OF[character] for character in piece])
        except KeyError:
            data = piece.encode()
        self[token_id] = data
        return data


class TextStream:
    """The text of ids as they come, each read once. A character's bytes are held until it is complete."""

    __slots__ = ("_held", "_pieces")

    def __init__(self, pieces: TokenPieces) -> None:
        self._pieces = pieces
        self._held = b""

    def feed(self, ids: Sequence[int], *, is_last: bool = False) -> str:
        """The text that is complete with these ids. The last ones also bring what never became a character."""
        data = self._pieces[ids[0]] if len(ids) == 1 else b"".join([self._pieces[id] for id in ids])
        if self._held:
            data = self._held + data
        text, size = codecs.utf_8_decode(data, "replace", is_last)
        self._held = data[size:]
        return text


def _read_end_tokens(folder: Path) -> tuple[int, ...]:
    path = folder / "generation_config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return ()
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error}") from error
    end = config.get("eos_token_id") if isinstance(config, dict) else None
    ids = end if isinstance(end, list) else [end]
    return tuple(id for id in ids if isinstance(id, int) and not isinstance(id, bool))


def _copy_with(added: list[Any], tokenizer: Any) -> Any:
    """A tokenizer with only these `added` tokens that shares the model, so the vocabulary is in memory once."""
    copy = type(tokenizer)(tokenizer.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (value := getattr(tokenizer, part)) is not None:
            setattr(copy, part, value)
    copy.add_tokens(added)
    return copy


def _ids(tokenizer: Any, text: str, *, add_special_tokens: bool = False) -> list[int]:
    """The ids of `text`. Unlike `encode`, this releases the GIL and computes no offsets."""
    return tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids


_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def download_hint(path: str | Path) -> str:
    """The command that makes a folder of the model; empty where `path` is no name of a model on the hub.

    rolltap downloads nothing itself.
    """
    name = str(path)
    if not _HUB_NAME.fullmatch(name) or Path(name).exists():
        return ""
    folder = name.partition("/")[2]
    return f"; of a model on the hub make a folder first: hf download {name} --local-dir {folder}"
