"""A deterministic engine server with the real engines' token API, which says what a script tells it.

`script` is what it says, `writing` makes it token ids, `sampling` chooses and paces, `journal` checks every prompt for
token continuity, `wires` speak as vLLM or SGLang do, `server` runs it (also inside a test's event loop).
"""

from rolltap.engine.scripted.journal import Entry, Journal
from rolltap.engine.scripted.sampling import logprob_of
from rolltap.engine.scripted.script import (
    STUB,
    Fault,
    Prompt,
    ReplyFunction,
    Rule,
    Script,
    ScriptedReply,
    ToolUse,
    load_script,
    say,
)
from rolltap.engine.scripted.server import ScriptedEngine, ServedModel

__all__ = [
    "STUB",
    "Entry",
    "Fault",
    "Journal",
    "Prompt",
    "ReplyFunction",
    "Rule",
    "Script",
    "ScriptedEngine",
    "ScriptedReply",
    "ServedModel",
    "ToolUse",
    "load_script",
    "logprob_of",
    "say",
]
