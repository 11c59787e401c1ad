"""A vocabulary of a usual size in the form of the tiny model's: prompts have as many tokens as with real models.

The merges are those of a tokenizer that the package `litellm` ships; the special tokens and the template are the tiny
model's.
"""

from __future__ import annotations

import json
import shutil
from importlib.resources import files
from pathlib import Path
from typing import Any

from rolltap.engine.tiny import FOLDER

SOURCE = "litellm_core_utils/tokenizers/anthropic_tokenizer.json"


def make_usual_vocabulary(folder: Path) -> Path:
    """Writes the vocabulary to `folder`, a Hugging Face folder without weights."""
    folder.mkdir()
    tokenizer: dict[str, Any] = json.loads((FOLDER / "tokenizer.json").read_text())
    source = json.loads((files("litellm") / SOURCE).read_text(encoding="utf-8"))
    special = {token["content"] for token in source["added_tokens"]}
    tokens = sorted(source["model"]["vocab"], key=source["model"]["vocab"].__getitem__)
    vocabulary = {token: id for id, token in enumerate(token for token in tokens if token not in special)}
    tokenizer["model"] |= {"vocab": vocabulary, "merges": source["model"]["merges"]}
    for id, token in enumerate(tokenizer["added_tokens"], len(vocabulary)):
        token["id"] = id
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    for name in ("tokenizer_config.json", "config.json", "generation_config.json"):
        shutil.copy(FOLDER / name, folder)
    return folder
