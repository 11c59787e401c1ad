"""Chat templates as vendors wrote them, many of models that no renderer knows: those in llama.cpp's source package.

They are fetched from the package index, so they are not of this repository. Their vocabularies are made up.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import pytest

from . import vocabularies
from .families import Family, Markup

PACKAGE = "llama_cpp_python==0.3.36"

_TAG = re.compile(
    r"<\|[^|<>\s'\"]+\|?>|<[^|<>\s'\"/]+\|>|<｜[^｜<>\s]+｜>|\[/?[A-Z_]+\]|｜DSML｜|<SPECIAL_\d+>|</?TOOLCALL>"
    r"|</?(?:s|think|mm:think|tool_calls?|tool_response|arg_key|arg_value|minimax:tool_call|seed:[a-z_]+|sep)>"
    r"|<(?:bos|eos|beginning_of_sentence|end_of_sentence)>|</assistant>|\]~!?b[\]\[]|\[e~\[|\]<\]minimax\[>\["
)
_INNER = re.compile(r"tool|think|arg|call|content|channel|constrain|message\||action|response", re.IGNORECASE)
"""Names of tokens that stand inside a turn."""

_ENDS = (
    "<SPECIAL_12>", "<end_of_sentence>", "<|message_sep|>", "<|eot|>", "<sep>", "<|end_of_msg|>", "<|role_end|>",
    "<|im_end|>", "<|END_OF_TURN_TOKEN|>", "<｜end▁of▁sentence｜>", "<|eot_id|>", "<|end|>", "<turn|>",
    "<|assistant_end|>", "<|end_of_text|>", "[e~[", "<seed:eos>", "<|return|>", "</assistant>", "<|user|>",
)  # fmt: skip
"""What ends a turn; the first that a template writes is its own. Mistral's `</s>` has another name there."""

_THINKING = (
    ("<think>", "</think>"), ("<|START_THINKING|>", "<|END_THINKING|>"), ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"), ("<|inner_prefix|>", "<|inner_suffix|>"), ("<mm:think>", "</mm:think>"),
)  # fmt: skip


def foreign_templates() -> Path:
    """The folder of the templates, downloaded once."""
    folder = vocabularies.CACHE / "foreign" / PACKAGE
    with vocabularies.locked(folder.parent):
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
                # Only this package: of `:all:`, what pip builds its metadata with would be built from source, too.
                options = ["--quiet", "--no-deps", "--no-binary", "llama_cpp_python", "--dest", scratch]
                command = [sys.executable, "-m", "pip", "download", *options, PACKAGE]
                done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=600)
                if done.returncode:
                    pytest.fail(f"can't get the source package {PACKAGE}: {done.stderr[-500:]}")
                (archive,) = Path(scratch).glob("*.tar.gz")
                unpacked = Path(scratch) / "templates"
                unpacked.mkdir()
                with tarfile.open(archive) as tar:
                    for member in tar:
                        if "/models/templates/" in member.name and member.name.endswith(".jinja"):
                            content = tar.extractfile(member)
                            assert content is not None
                            (unpacked / Path(member.name).name).write_bytes(content.read())
                unpacked.rename(folder)
    return folder


def foreign_family(name: str) -> Family:
    """A template with the tokens that it writes."""
    text = (foreign_templates() / f"{name}.jinja").read_text(encoding="utf-8")
    tags = dict.fromkeys(_TAG.findall(text))
    end = next((end for end in _ENDS if end in text), "</s>")
    words = tuple(tag for tag in tags if _INNER.search(tag) and tag != end)
    begin = "<s>" if "bos_token" in text else ""
    control = tuple(dict.fromkeys([*(tag for tag in tags if tag not in words), *filter(None, [begin]), end]))
    thinking = next((pair for pair in _THINKING if pair[0] in text), _THINKING[0])
    markup = Markup(control, (end,), begin=begin, words=words, thinking=thinking)
    return Family(f"{name} (template)", markup, template=name, folder=foreign_templates())
