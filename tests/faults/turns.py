"""The fault suite's engine script: a prompt's last message says, as JSON after `turn=`, what it is answered with."""

from __future__ import annotations

import json

import msgspec

from rolltap.engine.scripted import ScriptedReply
from rolltap.engine.scripted.script import Prompt

MARK = "turn="


def reply(prompt: Prompt) -> ScriptedReply | str:
    _, found, rest = prompt.last.rpartition(MARK)
    if not found:
        return "ok"
    value, _ = json.JSONDecoder().raw_decode(rest)
    return msgspec.convert(value, ScriptedReply)
