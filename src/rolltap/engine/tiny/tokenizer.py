"""The tiny model's tokenizer: Qwen3's special tokens, splitting rule and chat template over a vocabulary of our own.

The byte-pair merges are learned from text written in this repository (`corpus`), so that the words of the tasks are
one token each. `chat_template.jinja` is Qwen3's, as in trl 1.16.0 (`trl/chat_templates/qwen3.jinja`, Apache-2.0).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from rolltap.engine.tiny.tasks import HELD_OUT_NAMES, KINDS, MINI_SWE_AGENT, SUBMIT, TRAIN_NAMES

VOCABULARY = 1024  # at most: merges end when every word of the corpus is one token
CONTEXT = 4096
END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
USER = f"{START}user\n"
SPECIAL = (END_OF_TEXT, START, END)
MARKUP = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Qwen's pre-tokenizer expression."""

BASH_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Execute a bash command",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "The bash command to execute"}},
            "required": ["command"],
        },
    },
}
"""The tool that mini-swe-agent 2.4.6 declares."""

PROSE = """\
You are a helpful assistant. You may call one or more functions to assist with the user query. You are provided with
function signatures within XML tags. For each function call, return a json object with function name and arguments.
I will look at the files first. The file is there. The folder is empty. Now I make the file. It is done. Let me check.
The command failed. Try again with another command. Read the error, then write the word to the file. Please fix this.
What is in the file? Where is it? Which line has the word? How many lines are there? Who wrote this? When was it done?
Copy, move, rename, delete, remove, list, show, find, count, sort, reverse, link, put, add, create, make, empty, write.
An agent asks a model, the model asks for a tool, the tool answers, and the model goes on until the task is done.
cp: cannot stat 'x': No such file or directory
mv: cannot stat 'x': No such file or directory
rm: cannot remove 'x': Is a directory
mkdir: cannot create directory 'x': File exists
ln: failed to create symbolic link 'x': File exists
sort: cannot read: x: No such file or directory
tac: failed to open 'x' for reading: No such file or directory
sh: 1: cannot open x: No such file
sh: 1: cannot create x: Is a directory
cat: x: No such file or directory
0 1 2 3 4 5 6 7 8 9 10 12 16 20 25 32 50 64 100 127 128 255 256 1000 1024
"""


def chat_template() -> str:
    return (Path(__file__).parent / "chat_template.jinja").read_text()


def corpus(preamble: str) -> Iterator[str]:
    """The text that the merges are learned from; `preamble` is the rendered tool declaration."""
    names = TRAIN_NAMES + HELD_OUT_NAMES
    yield from [preamble] * 40
    yield from PROSE.splitlines() * 3
    yield from [f'{{"name": "bash", "arguments": {{"command": "{SUBMIT}"}}}}'] * 40
    yield from [MINI_SWE_AGENT["agent"]["system_template"], "exit 0\n", "exit 1\n", "exit 2\n", "ls\n"] * 20
    for index, name in enumerate(names):
        other = names[(index + 1) % len(names)]
        yield f"{name} {name}\n{name}.txt\n{name}.txt '{name}.txt' {name}\n" * 4
        for kind in KINDS:
            a, b = name + kind.suffix, f"{other}.txt"
            yield kind.instruction.format(a=a, b=b)
            yield f'{{"name": "bash", "arguments": {{"command": "{kind.command.format(a=a, b=b)}"}}}}'


def train(texts: Iterable[str]) -> Tokenizer:
    """A byte-level BPE of `VOCABULARY` entries, the special tokens last as in Qwen3. Deterministic."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL) - len(MARKUP),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKUP])
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json` for `AutoTokenizer.from_pretrained`."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT,
        "bos_token": None,
        "eos_token": END,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": chat_template(),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
