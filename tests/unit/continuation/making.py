"""Model folders that hold the tiny model's vocabulary and another family's chat template and special tokens."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

from rolltap.engine.tiny import FOLDER
from rolltap.proxy.continuation.template import TemplateRenderer
from rolltap.proxy.continuation.tokenizer import HubTokenizer

LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>")


def tokenizer_with(folder: Path, template: str, *special: str, **config: str) -> HubTokenizer:
    """A tokenizer whose vocabulary has the `special` tokens too; `config` stands over that of its folder."""
    spec = json.loads((FOLDER / "tokenizer.json").read_text())
    size = 1 + max(token["id"] for token in spec["added_tokens"])
    like = spec["added_tokens"][0]
    spec["added_tokens"] += [{**like, "id": size + at, "content": token} for at, token in enumerate(special)]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    own = json.loads((FOLDER / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**own, **config}))
    (folder / "chat_template.jinja").write_text(template)
    return HubTokenizer(folder)


def trl_template(name: str) -> str:
    """A chat template that the `trl` package ships."""
    found = find_spec("trl")
    assert found is not None
    assert found.origin is not None
    return (Path(found.origin).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


def llama_renderer(folder: Path) -> TemplateRenderer:
    """Llama 3.1's template, whose calls are plain text."""
    special = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
    return TemplateRenderer(tokenizer_with(folder, trl_template("llama3_1"), *LLAMA, **special))
