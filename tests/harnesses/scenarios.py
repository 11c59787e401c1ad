"""What harnesses are put through: the engine's script, the prompts, and what must be true afterwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rolltap.engine.scripted import Fault, Rule, Script, ScriptedReply, ToolUse

PROMPT = "MAINTASK: use your shell tool to create out.txt containing hi, then show its content."
SECOND_PROMPT = "PARTTWO: thanks, now say bye."
CHILD = "CHILDTASK: create child.txt with your shell tool."
LONG = 15


@dataclass(frozen=True)
class Tools:
    """How a harness's model calls its tools.

    The shell's name, its argument, and arguments that must be there as well; the call that begins a subagent, for those
    that have them; the command that ends a task, for those that are not done when the model just says so; and the
    engine's context that makes it compact its history in the compaction scenario, for those that do; `asks_summary`
    is a part of its request for a summary.
    """

    shell: str
    argument: str = "command"
    more: Mapping[str, Any] = field(default_factory=dict)
    agent: ToolUse | None = None
    finish: str = ""
    compacts_at: int = 0
    asks_summary: str = ""
    takes_list: bool = False

    def run(self, command: str) -> ToolUse:
        value = [command] if self.takes_list else command
        return ToolUse(tool=self.shell, arguments={self.argument: value, **self.more})

    def end(self, text: str) -> ScriptedReply:
        """The task's last turn."""
        return ScriptedReply(say=text, call=(self.run(self.finish),)) if self.finish else ScriptedReply(say=text)


def task(name: str, **more: Any) -> ToolUse:
    return ToolUse(tool=name, arguments={"description": "make child.txt", "prompt": CHILD, **more})


TOOLS: Mapping[str, Tools] = {
    "codex": Tools("exec_command", "cmd", compacts_at=36_000, asks_summary="CHECKPOINT COMPACTION"),
    "claude-code": Tools(
        "Bash",
        agent=task("Agent", subagent_type="general-purpose"),
        compacts_at=68_000,
        asks_summary="detailed summary of the conversation",
    ),
    "pi": Tools("bash", asks_summary="The messages above are"),
    "qwen-code": Tools("run_shell_command", more={"is_background": False}, asks_summary="scratchpad"),
    "gemini-cli": Tools("run_shell_command"),
    "opencode": Tools(
        "bash",
        agent=task("task", subagent_type="general"),
        compacts_at=28_000,
        asks_summary="context summarization agent",
    ),
    "openclaw": Tools("exec"),
    "copilot-cli": Tools(
        "bash", more={"description": "run it"}, asks_summary="detailed summary of the conversation so far"
    ),
    "cline": Tools("run_commands", "commands", takes_list=True),
    "mini-swe-agent": Tools("bash", finish="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
    "openai-agents": Tools("shell"),
    "mistral-vibe": Tools("bash", asks_summary="CHECKPOINT COMPACTION"),
    "hermes": Tools("terminal", asks_summary="TURNS TO SUMMARIZE"),
}


@dataclass(frozen=True)
class Scenario:
    """`script` is made for a harness's tools; `prompts` are given in turn, the later ones as resumed runs.

    `calls` is how many calls the main task takes where the harness adds none; `makes` the files that must be there.
    `breaks` are those that every harness has, by reason; `failed_calls` those that the engine failed. With `compacts`
    the harness is told of a context that the task does not fit in; `kill` ends the harness in mid-answer. `check` is
    what the harness's own log says of the record, where it is read. What a harness can't `notice` is run by few.
    """

    name: str
    script: Callable[[Tools], Script]
    calls: int
    prompts: tuple[str, ...] = (PROMPT,)
    makes: Mapping[str, str] = field(default_factory=dict)
    breaks: Mapping[str, int] = field(default_factory=dict)
    failed_calls: int = 0
    compacts: bool = False
    kill: bool = False
    needs_agent: bool = False
    check: str = "match"
    notice: bool = True


def main_rule(*turns: ScriptedReply) -> Rule:
    return Rule(when="MAINTASK", turns=turns, count="session", afterwards=ScriptedReply(say="All done."))


def script_of(*turns: ScriptedReply, rules: tuple[Rule, ...] = ()) -> Script:
    """Side calls (titles, summaries) get a short answer."""
    return Script(rules=(*rules, main_rule(*turns)), otherwise=ScriptedReply(say="Fine."))


def basic_turns(tools: Tools, fault: Fault | None = None, think: str = "I create it.") -> tuple[ScriptedReply, ...]:
    return (
        ScriptedReply(think=think, call=(tools.run("echo hi > out.txt"),)),
        ScriptedReply(say="Now I look.", call=(tools.run("cat out.txt"),), fault=fault),
        tools.end("It holds hi."),
    )


def basic(tools: Tools) -> Script:
    return script_of(*basic_turns(tools))


def long(tools: Tools) -> Script:
    steps = [ScriptedReply(call=(tools.run(f"echo {step} >> out.txt; tail -2 out.txt"),)) for step in range(LONG - 1)]
    return script_of(*steps, tools.end("Counted."))


def parallel(tools: Tools) -> Script:
    both = (tools.run("echo one > one.txt"), tools.run("echo two > two.txt"))
    return script_of(ScriptedReply(say="Both at once.", call=both), tools.end("Both are there."))


def subagent(tools: Tools) -> Script:
    assert tools.agent is not None
    child = Rule(
        when="CHILDTASK",
        turns=(ScriptedReply(call=(tools.run("echo child > child.txt"),)), ScriptedReply(say="child.txt is there.")),
    )
    parent = main_rule(ScriptedReply(say="I delegate.", call=(tools.agent,)), ScriptedReply(say="It is done."))
    return Script(rules=(parent, child), otherwise=ScriptedReply(say="Fine."))


def resume(tools: Tools) -> Script:
    """Without thinking, which the policy would rightly drop at a new user turn."""
    second = Rule(last="PARTTWO", when="PARTTWO", turns=(ScriptedReply(say="Bye."),), count="session")
    return script_of(*basic_turns(tools, think=""), rules=(second,))


def with_fault(**fault: Any) -> Callable[[Tools], Script]:
    return lambda tools: script_of(*basic_turns(tools, Fault(**fault)))


def compaction(tools: Tools) -> Script:
    floods = [
        ScriptedReply(say=f"I read the numbers, time {time}.", call=(tools.run("seq 1 1500"),)) for time in range(3)
    ]
    told = [
        ScriptedReply(say=f"<analysis>Long.</analysis>\n<summary>MAINTASK: numbers were read, part {part}.</summary>")
        for part in range(9)
    ]
    summary = Rule(last=tools.asks_summary, turns=tuple(told), count="session")
    return script_of(*floods, tools.end("Read."), rules=(summary,))


def endless(tools: Tools) -> Script:
    return script_of(ScriptedReply(say="word " * 2000, token_delay_s=0.02))


SCENARIOS: Mapping[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        Scenario("basic", basic, 3, makes={"out.txt": "hi\n"}),
        Scenario("long", long, LONG, makes={"out.txt": "".join(f"{step}\n" for step in range(LONG - 1))}),
        Scenario("parallel", parallel, 2, makes={"one.txt": "one\n", "two.txt": "two\n"}),
        Scenario(
            "subagent", subagent, 4, makes={"child.txt": "child\n"}, breaks={"new_conversation": 1}, needs_agent=True
        ),
        Scenario("resume", resume, 4, prompts=(PROMPT, SECOND_PROMPT), makes={"out.txt": "hi\n"}),
        Scenario(
            "429",
            with_fault(kind="status", status=429, retry_after=0.1),
            3,
            makes={"out.txt": "hi\n"},
            notice=False,
        ),
        Scenario("500", with_fault(kind="status", status=500), 3, makes={"out.txt": "hi\n"}, notice=False),
        Scenario("dropped", with_fault(kind="cut", after=4), 4, makes={"out.txt": "hi\n"}, failed_calls=1),
        Scenario("compaction", compaction, 0, compacts=True),
        Scenario("cancelled", endless, 1, kill=True, check="none"),  # no reply has been logged by then
    )
}
