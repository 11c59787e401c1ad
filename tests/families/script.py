"""What the model of a family says to every harness: a tool loop with parallel calls and a failed tool, a second prompt.

All replies are sampled as tokens that no tokenizer would choose (`split` "odd").
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from rolltap.engine.scripted import Prompt, ScriptedReply, ToolUse

from .families import Family

TASK = "MAINTASK: use your shell tool to create one.txt and two.txt, then look for more."
SECOND_TASK = "PARTTWO: thanks. List the files once more and say bye."
FIRST, SECOND, FAILING, LISTING = "echo one > one.txt", "echo two > two.txt", "cat missing.txt", "ls"
MAKES = {"one.txt": "one\n", "two.txt": "two\n"}
GOODBYE = "Bye."
SUMMARY = "<summary>MAINTASK: one.txt and two.txt were made.</summary>"

RunTool = Callable[[str], ToolUse]
"""Makes the call of a harness's shell tool with a command."""


@dataclass
class SessionScript:
    """The replies to one session's prompts, in turn; `summary` stands in the harness's request for a summary.

    `finish` is the command that ends a task, for harnesses that need one. With `floods` the model reads long outputs
    until a small context is full.
    """

    family: Family
    run: RunTool
    finish: str = ""
    summary: str = ""
    floods: bool = False
    replies: list[ScriptedReply] = field(init=False)
    second: list[ScriptedReply] = field(init=False)

    def __post_init__(self) -> None:
        if not self.family.tools:
            self.replies = [_reply("I can't call tools.", "Type this:\n\n    echo one > one.txt")]
            self.second = [_reply("", GOODBYE)]
            return
        made = [_reply("I create them.", "", self.run(FIRST), self.run(SECOND))]
        if not self.family.parallel:
            made = [_reply("I create one.", "", self.run(FIRST)), _reply("", "And two.", self.run(SECOND))]
        end = (
            _reply("All is made.", "", self.run(self.finish))
            if self.finish
            else _reply("All is made.", "Both are there.")
        )
        floods = [_reply("", f"I read, time {time}.", self.run("seq 1 1500")) for time in range(3 * self.floods)]
        self.replies = [*made, *floods, _reply("Is there more?", "Now I look.", self.run(FAILING)), end]
        self.second = [_reply("Again.", "", self.run(LISTING)), _reply("", GOODBYE)]

    def next(self, prompt: Prompt) -> ScriptedReply:
        if self.summary and self.summary in prompt.last:
            return _reply("", SUMMARY)
        if "MAINTASK" not in prompt.text:
            return ScriptedReply(say="Fine.")  # titles and the like
        replies = self.second if "PARTTWO" in prompt.text else self.replies
        return replies.pop(0) if replies else ScriptedReply(say="Done.", split="odd")


class Replies(Protocol):
    """What a session's model says."""

    def next(self, prompt: Prompt) -> ScriptedReply: ...


class FamilyModel:
    """The scripted engine's reply function: each session has a script of its own."""

    def __init__(self, family: Family) -> None:
        self.family = family
        self._scripts: dict[str, Replies] = {}

    def put(self, session_id: str, replies: Replies) -> None:
        """Gives a session its replies."""
        self._scripts[session_id] = replies

    def add(self, session_id: str, run: RunTool, *, finish: str = "", summary: str = "", floods: bool = False) -> None:
        self.put(session_id, SessionScript(self.family, run, finish, summary, floods))

    def __call__(self, prompt: Prompt) -> ScriptedReply:
        script = self._scripts.get(prompt.session)
        return script.next(prompt) if script is not None else ScriptedReply(say="Fine.")  # the proxy's own probe


def _reply(think: str, say: str, *calls: ToolUse) -> ScriptedReply:
    return ScriptedReply(think=think, say=say, call=calls, split="odd")


def output_of(command: str) -> tuple[str, bool]:
    """What the shell says of one of the script's commands, and whether it failed."""
    texts = {FAILING: ("cat: missing.txt: No such file or directory", True), LISTING: ("one.txt\ntwo.txt", False)}
    return texts.get(command, ("", False))
