"""A small harness that is simulated: it plays workflows as harnesses do, and knows what each of its calls is for.

A `Workflow` makes the calls of one session. Its agents keep their histories as harnesses keep them, and every reply is
made of words that no other reply has, so that what stands in a prompt was put there by the workflow. The expected kind,
mask and agent of a call are those of the `Step`; nothing of them is sent.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from .recordings import STREAMED, Line, Step

MORE_TOOLS, FEW_TOOLS = ("bash", "edit", "task"), ("bash", "note")
SIDE = {"kind": "auxiliary", "mask": "auxiliary"}
SUMMARY = {"kind": "summary", "mask": "summary"}


@dataclass
class Agent:
    """A conversation of one agent. `lines` is its history without the system text."""

    system: str
    tools: tuple[str, ...] = MORE_TOOLS
    lines: list[Line] = field(default_factory=list)
    name: str = ""
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def request(self) -> tuple[Line, ...]:
        return (Line("system", self.system), *self.lines)

    @property
    def answer(self) -> str:
        return self.lines[-1].text


class Workflow:
    """The calls of a session, in order."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.steps: list[Step] = []
        self._words = 0
        self.task = self.words(9)

    def words(self, count: int = 12) -> str:
        """Words that no other text of the workflow has."""
        self._words += 1
        letters = "abcdefghijklmnoprstuvw"
        return " ".join(f"{''.join(self.random.choices(letters, k=5))}{self._words}" for _ in range(count)) + "."

    def agent(self, **more: Any) -> Agent:
        return Agent(f"You are the {self.words(3)}", lines=[Line("user", f"Do this: {self.task}")], **more)

    def ask(self, lines: tuple[Line, ...], reply: str, **more: Any) -> str:
        self.steps.append(Step(lines, reply, **more))
        return reply

    def act(self, agent: Agent, count: int = 1, **more: Any) -> None:
        """`count` turns in which the agent calls a tool."""
        for _ in range(count):
            self.call_tool(agent, **more)
            self.give_result(agent)

    def call_tool(self, agent: Agent, **more: Any) -> None:
        text, number = self.words(5), f"c{len(self.steps)}"
        call = f'<tool_call>\n{{"name": "bash", "arguments": {{"command": "run {number}"}}}}\n</tool_call>'
        self.ask(agent.request, f"{text}\n{call}", **self._expected(agent, minted=number, **more))
        agent.lines.append(Line("assistant", text, number, f"run {number}"))

    def give_result(self, agent: Agent, text: str = "") -> None:
        agent.lines.append(Line("tool", text or self.words(6), agent.lines[-1].call))

    def reply(self, agent: Agent, text: str = "", **more: Any) -> str:
        """A turn in which the agent answers."""
        text = self.ask(agent.request, text or self.words(), **self._expected(agent, **more))
        agent.lines.append(Line("assistant", text))
        return text

    def user(self, agent: Agent, text: str = "") -> None:
        agent.lines.append(Line("user", text or f"And now {self.words(5)}"))

    def work(self, agent: Agent, turns: int = 2) -> str:
        """The agent's work on what it was asked last: some tool calls and an answer."""
        self.act(agent, turns)
        return self.reply(agent)

    def side(self, lines: tuple[Line, ...], words: int = 4, tools: tuple[str, ...] = (), **more: Any) -> str:
        return self.ask(lines, self.words(words), **{**SIDE, "tools": tools, **more})

    def _expected(self, agent: Agent, **more: Any) -> dict[str, Any]:
        return {"tools": agent.tools, "agent": agent.name, "fields": agent.fields, **more}


def asked_of(system: str, agent: Agent, question: str) -> tuple[Line, ...]:
    """A request that has an agent's history under another system text."""
    return (Line("system", system), *agent.lines, Line("user", question))


def transcript(agent: Agent) -> str:
    """A history as text, as harnesses paste it into one message."""
    return "\n".join(f"[{line.role}]: {line.text}" for line in agent.lines)


# Habits of harnesses, which change all requests of a workflow.


def reminds(steps: list[Step]) -> list[Step]:
    """A message of the user's follows each tool result."""
    reminder = Line("user", "Remember the rules.")

    def told(lines: tuple[Line, ...]) -> tuple[Line, ...]:
        return tuple(each for line in lines for each in ([line, reminder] if line.role == "tool" else [line]))

    return [replace(step, lines=told(step.lines)) for step in steps]


def tells_the_time(steps: list[Step]) -> list[Step]:
    """The system text of requests with tools is another one each time."""
    return [
        replace(step, lines=(replace(step.lines[0], text=f"{step.lines[0].text} It is {at}."), *step.lines[1:]))
        if step.tools
        else step
        for at, step in enumerate(steps)
    ]


def clears_results(steps: list[Step]) -> list[Step]:
    """Only the last two tool results are kept."""

    def cleared(lines: tuple[Line, ...]) -> tuple[Line, ...]:
        kept = [at for at, line in enumerate(lines) if line.role == "tool"][-2:]
        return tuple(
            replace(line, text="cleared") if line.role == "tool" and at not in kept else line
            for at, line in enumerate(lines)
        )

    return [replace(step, lines=cleared(step.lines)) for step in steps]


HABITS: dict[str, Callable[[list[Step]], list[Step]]] = {
    "plain": list, "reminds": reminds, "tells the time": tells_the_time, "clears results": clears_results
}  # fmt: skip


# Side calls beside an agent with tools.


def routed(flow: Workflow) -> None:
    """A router sees the growing history before each turn."""
    main, system = flow.agent(), f"Choose a model: {flow.words(4)}"

    def route() -> None:
        flow.side((Line("system", system), *main.lines), 2)

    for _ in range(3):
        route()
        flow.act(main)
    route()
    flow.reply(main)
    flow.user(main)
    route()
    flow.reply(main)


def next_speaker(flow: Workflow) -> None:
    """After each answer the harness asks who speaks next, also after the last."""
    main, system = flow.agent(), f"Say who speaks: {flow.words(4)}"
    for _ in range(3):
        flow.work(main, 1)
        flow.side(asked_of(system, main, "Who speaks next?"), 1)
        flow.user(main)
    flow.work(main, 1)
    flow.side(asked_of(system, main, "Who speaks next?"), 1)


def next_speaker_under_the_agents_system_text(flow: Workflow) -> None:
    main = flow.agent()
    for _ in range(3):
        flow.work(main, 1)
        flow.side(asked_of(main.system, main, "Who speaks next?"), 1)
        flow.user(main)
    flow.work(main, 1)
    flow.side(asked_of(main.system, main, "Who speaks next?"), 1)


def title_first(flow: Workflow) -> None:
    main = flow.agent()
    flow.side((Line("system", "Write a title."), Line("user", flow.task)))
    flow.work(main)


def title_with_tools(flow: Workflow) -> None:
    """The title is asked with the agent's tools, under a system text of its own."""
    main = flow.agent()
    flow.side((Line("system", "Write a title."), Line("user", flow.task)), tools=main.tools)
    flow.work(main)


def title_in_the_agents_frame(flow: Workflow) -> None:
    main = flow.agent()
    flow.act(main)
    question = Line("user", f"Write a title for this: {main.lines[0].text}")
    flow.side((Line("system", main.system), question), tools=main.tools)
    flow.work(main)


def title_of_the_history_with_tools(flow: Workflow) -> None:
    main = flow.agent()
    flow.work(main, 1)
    flow.side(asked_of(main.system, main, "Write a title for all this."), tools=main.tools)
    flow.user(main)
    flow.work(main, 1)


def suggestions(flow: Workflow) -> None:
    """After each answer but the last, a fork suggests what the user may ask; it has the agent's frame."""
    main = flow.agent()
    for _ in range(3):
        flow.work(main, 1)
        flow.side(asked_of(main.system, main, "Suggest the user's next words."), tools=main.tools)
        flow.user(main)
    flow.work(main, 1)


def memory_agent(flow: Workflow) -> None:
    """After each answer an agent with other tools writes down what the history teaches, also after the last."""
    main, system = flow.agent(), f"You keep the memory: {flow.words(4)}"
    for last in (False, False, True):
        flow.work(main, 1)
        memory = Agent(system, FEW_TOOLS, [*main.lines, Line("user", "Extract memories.")])
        flow.act(memory, flow.random.randrange(3), **SIDE)
        flow.reply(memory, **SIDE)
        if not last:
            flow.user(main)


def judge_beside_tools(flow: Workflow) -> None:
    main = flow.agent()
    for _ in range(2):
        answer = flow.work(main, 1)
        flow.side((Line("system", "You grade."), Line("user", f"Grade this: {answer}")), 2)
        flow.user(main)
    flow.work(main, 1)


# Subagents.


def subagents(flow: Workflow) -> None:
    """One after the other and in parallel, with tools of their own or the agent's; their answers are tool results."""
    main = flow.agent()
    flow.act(main)
    number = 0
    for count in (1, 3):
        flow.call_tool(main)
        tools = flow.random.choice([main.tools, FEW_TOOLS])
        subs = [flow.agent(tools=tools, name=f"subagent-{number + at + 1}") for at in range(count)]
        number += count
        for sub in subs:
            sub.lines = [Line("user", flow.words(8))]
        for _ in range(flow.random.randrange(1, 3)):
            for sub in subs:
                flow.act(sub)
        answers = [flow.reply(sub) for sub in subs]
        flow.give_result(main, "\n".join(f"<result>{answer}</result>" for answer in answers))
    flow.reply(main)


def subagents_that_answer_at_once(flow: Workflow) -> None:
    main = flow.agent()
    flow.call_tool(main)
    sub = flow.agent(name="subagent-1")
    sub.lines = [Line("user", flow.words(8))]
    flow.give_result(main, f"It says: {flow.reply(sub)}")
    flow.reply(main)


def subagents_with_the_history(flow: Workflow) -> None:
    """A subagent continues the agent's history; its answer is the result of the call that began it."""
    main = flow.agent()
    flow.act(main)
    flow.call_tool(main)
    sub = replace(main, lines=[*main.lines], name="subagent-1")
    flow.give_result(sub, "You are the subagent.")
    flow.user(sub)
    flow.give_result(main, f"It says: {flow.work(sub, flow.random.randrange(2))}")
    flow.reply(main)


# Pipelines: the next stage gets the last one's answer.


def pipeline(flow: Workflow) -> None:
    """Coder, tester and fixer have the same tools, each a system text of its own."""
    answer = ""
    for _ in range(3):
        stage = flow.agent()
        stage.lines[0] = Line("user", f"{flow.task} The last one said: {answer}")
        answer = flow.work(stage, 2)


def pipeline_in_one_frame(flow: Workflow) -> None:
    first, answer = flow.agent(), ""
    for _ in range(3):
        stage = replace(first, lines=[Line("user", f"{flow.task} {flow.words(3)} Before: {answer}")])
        answer = flow.work(stage, 2)


def verifier(flow: Workflow) -> None:
    main = flow.agent()
    answer = flow.work(main, 3)
    flow.work(replace(main, lines=[Line("user", f"Verify this: {answer}")]), flow.random.randrange(2))


def questions(flow: Workflow) -> None:
    """Several questions, each in a conversation of its own; some take one call."""
    main = flow.agent()
    for turns in (0, 0, 2, 0):
        flow.work(replace(main, lines=[Line("user", flow.words(9))]), turns)


# The same agent with other tools.


def plan_then_build(flow: Workflow) -> None:
    main = flow.agent(tools=FEW_TOOLS)
    flow.work(main)
    main.tools, main.system = MORE_TOOLS, f"You build now. {main.system}"
    flow.user(main)
    flow.work(main)


def handoff(flow: Workflow) -> None:
    main = flow.agent()
    flow.call_tool(main)
    flow.give_result(main, "Handed over.")
    main.tools, main.system = FEW_TOOLS, f"You are the specialist: {flow.words(3)}"
    flow.work(main)


def last_word_without_tools(flow: Workflow) -> None:
    """The agent has used up its turns, and is asked for its answer without tools."""
    main = flow.agent()
    flow.act(main, 3)
    flow.ask(asked_of("Answer now.", main, "Your answer?"), flow.words(), tools=())


# Summaries.


@dataclass(frozen=True)
class Compaction:
    """How a harness compacts: how it asks for the summary, what of the history it keeps, and its discarded attempts."""

    asks: str  # "within" the conversation, "beside" it without tools, or with the history "pasted" into one message
    keeps_turn: bool = False
    before: int = 0  # attempts that the harness discards before the summary
    after: int = 0
    first_within: bool = False  # the discarded attempts before the summary are asked for within the conversation
    as_reply: bool = False  # the summary comes back as a reply of the agent's
    instruction: str = "Write the summary."

    def run(self, flow: Workflow, main: Agent, number: int) -> None:
        """Compacts `main`'s history, whose last line is a tool's result or an answer."""
        kept = main.lines[-2:] if self.keeps_turn else []
        seen = main.lines[:-2] if self.keeps_turn else main.lines
        shown = replace(main, lines=[*seen])
        for attempt in range(self.before):
            self._ask(flow, shown, attempt, "within" if self.first_within else self.asks)
        summary = self._ask(flow, shown, 7, self.asks)
        for attempt in range(self.after):
            self._ask(flow, shown, 8 + attempt, self.asks)
        main.lines = [Line("user", f"{flow.task} Summary {number}: {summary}"), *kept]
        if self.as_reply:
            resumed = Line("user", "What did we do so far?"), Line("assistant", summary)
            main.lines = [*resumed, Line("user", "Go on."), *kept]

    def _ask(self, flow: Workflow, shown: Agent, attempt: int, asks: str) -> str:
        question = f"{self.instruction} Try {attempt}."
        if asks == "within":
            return flow.ask(asked_of(shown.system, shown, question), flow.words(), tools=shown.tools, **SUMMARY)
        if asks == "beside":
            return flow.ask(asked_of("You summarise.", shown, question), flow.words(), tools=(), **SUMMARY)
        pasted = (Line("system", "You summarise."), Line("user", f"{question} {transcript(shown)}"))
        return flow.ask(pasted, flow.words(), tools=(), **SUMMARY)


COMPACTIONS = {
    f"{asks}{', a turn kept' if keeps else ''}, {before} before, {after} after{', first within' if first else ''}": (
        Compaction(asks, keeps, before, after, first)
    )
    for asks in ("within", "beside", "pasted")
    for keeps in (False, True)
    for before, after, first in ((0, 0, False), (1, 0, False), (0, 1, False), (1, 1, False), (1, 0, True))
    if not (asks == "within" and first)
} | {
    f"pasted, returned as a reply, {after} after": Compaction("pasted", after=after, as_reply=True) for after in (0, 1)
}


def compacted(flow: Workflow, how: Compaction, times: int) -> None:
    """A task that is compacted `times` times, in its middle or after an answer."""
    main = flow.agent()
    for number in range(times):
        flow.act(main, flow.random.randrange(2, 4))
        if flow.random.random() < 0.3 and not how.keeps_turn:
            flow.reply(main)
        how.run(flow, main, number)
    flow.work(main, flow.random.randrange(3))


def mixed(flow: Workflow) -> None:
    """An agent with all kinds of side calls, subagents and compactions, in any order."""
    main, number = flow.agent(), 0
    systems = [f"System text {at}: {flow.words(4)}" for at in range(4)]
    compaction = flow.random.choice(list(COMPACTIONS.values()))
    if flow.random.random() < 0.5:
        flow.side((Line("system", systems[3]), Line("user", flow.task)), tools=flow.random.choice([(), main.tools]))
    for _ in range(flow.random.randrange(4, 9)):
        flow.act(main)
        event = flow.random.randrange(8)
        if event == 0:
            flow.side((Line("system", systems[0]), *main.lines), 2)
        elif event == 1:
            flow.reply(main)
            flow.side(asked_of(main.system, main, "Suggest the user's next words."), tools=main.tools)
            flow.user(main)
        elif event == 2:
            flow.reply(main)
            memory = Agent(systems[1], FEW_TOOLS, [*main.lines, Line("user", "Extract memories.")])
            flow.act(memory, flow.random.randrange(3), **SIDE)
            flow.reply(memory, **SIDE)
            flow.user(main)
        elif event == 3:
            flow.side((Line("system", systems[2]), Line("user", f"Grade this: {transcript(main)}")), 2)
        elif event == 4:
            flow.call_tool(main)
            subs = [flow.agent(name=f"subagent-{(number := number + 1)}") for _ in range(flow.random.randrange(1, 4))]
            for sub in subs:
                sub.lines = [Line("user", flow.words(8))]
                flow.act(sub)
            flow.give_result(main, "\n".join(flow.reply(sub) for sub in subs))
        elif event == 5:
            flow.act(main)
            compaction.run(flow, main, number)
    flow.work(main)


def no_attempt_succeeds(flow: Workflow) -> None:
    """Two attempts at a summary fail, one with a tool call, and the conversation goes on."""
    main = flow.agent()
    flow.act(main, 2)
    flow.side(asked_of(main.system, main, "Write the summary."), 9, tools=main.tools)
    attempt = replace(main, lines=[*main.lines, Line("user", "Write the summary in tags.")])
    flow.call_tool(attempt, **SIDE)
    flow.work(main, 2)


# Agents without tools.


def scratchpad(flow: Workflow) -> None:
    """One prompt is written anew each turn, with what was said before."""
    system, notes = f"You reason and act: {flow.words(3)}", ""
    for _ in range(4):
        said = flow.ask((Line("system", system), Line("user", f"{flow.task} {notes}")), flow.words(), tools=())
        notes += f"\n{said}\nObservation: {flow.words(4)}"


def roles_in_turn(flow: Workflow) -> None:
    said = ""
    for name in ("planner", "coder", "critic"):
        lines = (Line("system", f"You are the {name}."), Line("user", f"{flow.task} {said}"))
        said = flow.ask(lines, flow.words(), tools=())


def two_conversations(flow: Workflow) -> None:
    agents = [flow.agent(tools=(), name=name) for name in ("", "subagent-1")]
    for _ in range(3):
        for agent, other in zip(agents, reversed(agents), strict=True):
            flow.user(agent, f"They said: {other.lines[-1].text}")
            flow.reply(agent)


def one_edit_and_its_commit_message(flow: Workflow) -> None:
    """The edit is streamed; the message, for a diff that holds the reply, is not."""
    main = flow.agent(tools=(), fields=STREAMED)
    said = flow.reply(main)
    flow.side((Line("system", "Write a commit message."), Line("user", f"+ {said}")))


def edits_and_commit_messages(flow: Workflow) -> None:
    """Both are streamed, or neither is."""
    main = flow.agent(tools=(), fields=flow.random.choice([STREAMED, {}]))
    for _ in range(3):
        said = flow.reply(main)
        flow.side((Line("system", "Write a commit message."), Line("user", f"+ {said}")), fields=main.fields)
        flow.user(main)
    said = flow.reply(main)
    flow.side((Line("system", "Write a commit message."), Line("user", f"+ {said}")), fields=main.fields)


def judge_beside_an_agent_without_tools(flow: Workflow) -> None:
    main = flow.agent(tools=())
    for _ in range(3):
        said = flow.reply(main)
        flow.side((Line("system", "You grade."), Line("user", f"Grade this: {said}")), 2)
        flow.user(main)
    flow.reply(main)


WORKFLOWS: dict[str, Callable[[Workflow], None]] = {
    made.__name__.replace("_", " "): made
    for made in (
        routed, next_speaker, next_speaker_under_the_agents_system_text, title_first, title_with_tools,
        title_in_the_agents_frame, title_of_the_history_with_tools, suggestions, memory_agent, judge_beside_tools,
        subagents, subagents_that_answer_at_once, subagents_with_the_history, pipeline, pipeline_in_one_frame, verifier,
        questions, mixed, plan_then_build, handoff, last_word_without_tools, no_attempt_succeeds, scratchpad,
        roles_in_turn, two_conversations, one_edit_and_its_commit_message, edits_and_commit_messages,
        judge_beside_an_agent_without_tools,
    )
}  # fmt: skip
