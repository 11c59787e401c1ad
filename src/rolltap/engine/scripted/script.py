"""What a scripted engine says: rules with scripted replies (`turns`), read from TOML, JSON or Python.

    [[rules]]
    when = "count the files"              # the prompt's text holds this; without it, any prompt
    [[rules.turns]]
    think = "I should look."
    call = [{ tool = "bash", arguments = { command = "ls | wc -l" } }]
    [[rules.turns]]
    say = "There are three."
    fault = { kind = "cut", after = 2 }   # the first try breaks off after two tokens

The first rule that fits is taken; the n-th of its `turns` is the n-th reply of a lineage
(`rolltap.engine.scripted.journal`).
After the last of them a rule says `afterwards`. A key that is not named here stops the start.
"""

from __future__ import annotations

import json
import runpy
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from rolltap.decoding import convert
from rolltap.errors import ConfigError
from rolltap.wording import value_problem


class ToolUse(Struct, frozen=True, forbid_unknown_fields=True):
    """A tool call. `arguments` is an object, or text that is written as it stands (for calls that can't be read)."""

    tool: str
    arguments: dict[str, Any] | str = {}


class Fault(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What goes wrong with a scripted reply, on its first `times` tries of the same prompt (0: on every one).

    `after` counts the tokens that are sampled well before it; `at_byte`, for "cut", the bytes of the streamed body.

    | kind | the server |
    |---|---|
    | `status` | answers `status` (with `retry_after` seconds where given) |
    | `hang` | says no more; with `after` 0 it does not begin |
    | `cut` | drops the connection |
    | `garbage` | sends an event that is not JSON, then goes on |
    | `error` | sends an error event and ends |
    | `unfinished` | ends its stream cleanly, without a finish |
    | `abort` | ends the request with finish "abort" |
    | `no_logprobs` | sends no log-probs from there on |
    | `short_logprobs` | sends one log-prob too few |
    | `nan_logprobs` | sends NaN, as Python writes it |
    | `null_logprobs` | sends null for NaN, as pydantic and orjson write it |
    | `altered_prompt` | says that it saw another prompt than it was sent |
    """

    kind: Literal[
        "status",
        "hang",
        "cut",
        "garbage",
        "error",
        "unfinished",
        "abort",
        "no_logprobs",
        "short_logprobs",
        "nan_logprobs",
        "null_logprobs",
        "altered_prompt",
    ]
    after: int = 0
    at_byte: int | None = None
    times: int = 1
    status: int = 500
    retry_after: float | None = None


class ScriptedReply(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One reply of a scripted engine. `think`, `say` and `call` are written as the model's family writes them.

    `text` stands for them all: it is encoded as it is, special tokens included. `ids` are sampled as they are, with
    nothing added. `split` decides how the text becomes tokens: "usual" as the tokenizer does, "bytes" one token a
    byte, "odd" cut at places that the tokenizer would not choose (all give the same text). `end` False leaves the
    end-of-turn token out. `delay_s` is waited before the first token, `token_delay_s` before each further event of
    `tokens_per_event` tokens. At token `hold` it waits until the engine's `release` is called.
    """

    think: str = ""
    say: str = ""
    call: tuple[ToolUse, ...] = ()
    text: str | None = None
    ids: tuple[int, ...] | None = None
    split: Literal["usual", "bytes", "odd"] = "usual"
    end: bool = True
    delay_s: float = 0.0
    token_delay_s: float = 0.0
    tokens_per_event: int = 1
    hold: int | None = None
    fault: Fault | None = None


class Rule(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one kind of conversation gets. `when` is looked for in the whole prompt, `last` after its last reply.

    With `count` "session", a prompt that continues nothing goes on at the session's count of this rule's replies,
    instead of beginning anew (for harnesses that edit their history).
    """

    turns: tuple[ScriptedReply, ...]
    when: str = ""
    last: str = ""
    afterwards: ScriptedReply = ScriptedReply(say="Done.")
    count: Literal["lineage", "session"] = "lineage"


class Script(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The rules, first fit first, and what a prompt gets that none fits (None: a refusal that says so)."""

    rules: tuple[Rule, ...] = ()
    otherwise: ScriptedReply | None = None


class Prompt(Struct, frozen=True):
    """What a `reply` function is asked: `turn` counts the replies of the lineage so far."""

    ids: list[int]
    text: str
    last: str
    turn: int
    session: str
    model: str


ReplyFunction = Callable[[Prompt], ScriptedReply | str]
"""Answers a prompt; text is what the reply says."""

STUB = Script(otherwise=ScriptedReply(text="x" * 256, tokens_per_event=256))
"""A fixed reply of 256 bytes in one event, for load tests."""


def say(*replies: ScriptedReply | str) -> Script:
    """The script of one rule that fits every prompt; text is what a reply says."""
    return Script(
        rules=(Rule(turns=tuple(ScriptedReply(say=reply) if isinstance(reply, str) else reply for reply in replies)),)
    )


def load_script(path: Path) -> Script | ReplyFunction:
    """The script in a `.toml`, `.json` or `.py` file (which defines `SCRIPT`, or a function `reply`)."""
    readers: dict[str, Callable[[Path], Any]] = {
        ".toml": lambda path: tomllib.loads(path.read_text(encoding="utf-8")),
        ".json": lambda path: json.loads(path.read_text(encoding="utf-8")),
        ".py": _python,
    }
    if path.suffix not in readers:
        raise ConfigError(f"{path}: a script is one of {', '.join(readers)}")
    try:
        loaded = readers[path.suffix](path)
    except OSError as error:
        raise ConfigError(f"can't read the script {path}: {error.strerror}") from error
    except (ValueError, SyntaxError) as error:
        raise ConfigError(f"{path} is not {path.suffix[1:]}: {error}") from error
    if isinstance(loaded, Script):
        return loaded
    if callable(loaded):
        reply: ReplyFunction = loaded  # type: ignore[assignment]
        return reply
    try:
        return convert(loaded, Script)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {value_problem(str(error))}") from error


def _python(path: Path) -> Any:
    names = runpy.run_path(str(path))
    if "SCRIPT" not in names and "reply" not in names:
        raise ConfigError(f"{path} defines neither SCRIPT nor a function reply(prompt)")
    return names.get("SCRIPT", names.get("reply"))
