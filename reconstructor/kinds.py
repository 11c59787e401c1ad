"""Decides each call's kind from the whole session. The first rule that holds decides:

1. `session`: the session belongs to a judge or a simulated user.
2. `stated`: the policy is a frozen helper, or the harness's header states the purpose.
3. `role`: the session's owner gave the caller a role, whose calls are the agent's.
4. `replaces_history`: a summary, or a discarded attempt at one (`summaries.py`).
5. `fork`: a call of a branch that the conversation goes on without (`side_calls.py`).
6. `aside`: a side call that is a request of its own, or sees the conversation without its tools (`side_calls.py`).
7. `agent`: all other calls. So in a session without tools nearly every call is the agent's.

Only quotes in later prompts count, not quotes in replies.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from enum import StrEnum

from rolltap.reconstructor.forest import PrefixNode, TokenForest
from rolltap.reconstructor.side_calls import Forks, asides_of, forks_of
from rolltap.reconstructor.summaries import compacted_thread, summaries_of
from rolltap.reconstructor.threads import Thread, Threads, threads_of
from rolltap.types import BreakReason, CallKind

SUBAGENT = "subagent-{}"
"""Name of an agent without a name in a header: the number of its conversation within the session."""


class KindRule(StrEnum):
    """The rule that decided a call's kind."""

    SESSION = "session"
    STATED = "stated"
    ROLE = "role"
    REPLACES_HISTORY = "replaces_history"
    FORK = "fork"
    ASIDE = "aside"
    AGENT = "agent"


@dataclass(frozen=True, slots=True)
class Purpose:
    """A call's kind, the rule that decided it, and the call's agent ("" is the main agent)."""

    kind: CallKind
    rule: KindRule
    agent: str


@dataclass(frozen=True, slots=True, eq=False)
class Purposes:
    """The purpose of each call by id, and the calls that continue after a summary of the previous history."""

    by_call: Mapping[str, Purpose]
    compacted: frozenset[str]


def purposes_of(forest: TokenForest) -> Purposes:
    """Applies the rules to a whole session."""
    threads = threads_of(forest)
    summaries = summaries_of(forest, threads)
    forks = forks_of(forest, threads, summaries)
    asides = asides_of(forest, threads, summaries)
    compactions = {**summaries, **_stated_summaries(forest, summaries)}
    agents = _agents(threads, compactions, forks, asides)
    by_call: dict[str, Purpose] = {}
    for node in forest:
        kind, rule = _stated(node) or (CallKind.MAIN, KindRule.AGENT)
        if rule is KindRule.AGENT and node.id in summaries:
            kind, rule = CallKind.SUMMARY, KindRule.REPLACES_HISTORY
        elif rule is KindRule.AGENT and node.id in forks.side:
            kind, rule = CallKind.AUXILIARY, KindRule.FORK
        elif rule is KindRule.AGENT and node.id in asides:
            kind, rule = CallKind.AUXILIARY, KindRule.ASIDE
        agent = agents.get(node.id, "") if kind is CallKind.MAIN else ""
        by_call[node.id] = Purpose(kind, rule, node.call.agent or agent)
    return Purposes(by_call, frozenset(node.id for node in compactions.values()))


def _stated(node: PrefixNode) -> tuple[CallKind, KindRule] | None:
    """The kind and rule if the call alone decides them."""
    call = node.call
    if call.kind in (CallKind.JUDGE, CallKind.SIMULATOR):
        return call.kind, KindRule.SESSION
    if call.kind is not CallKind.MAIN:
        return call.kind, KindRule.STATED
    return (CallKind.MAIN, KindRule.ROLE) if call.shape.role else None


def _stated_summaries(forest: TokenForest, summaries: Mapping[str, PrefixNode]) -> dict[str, PrefixNode]:
    """The summaries that recorded compactions name, by their headers, with the call that continues after each."""
    stated: dict[str, PrefixNode] = {}
    for node in forest:
        recorded = node.call.break_
        if recorded is None or recorded.reason is not BreakReason.COMPACTION:
            continue
        for call_id in (recorded.parent_id, node.call.parent_id, *node.call.shape.quotes):
            named = forest.get(call_id)
            if named is not None and (named.call.kind is CallKind.SUMMARY or named.id in summaries):
                stated.setdefault(named.id, node)
    return stated


def _agents(
    threads: Threads, compactions: Mapping[str, PrefixNode], forks: Forks, asides: Container[str]
) -> dict[str, str]:
    """Names for subagents without a name in a header, by call.

    A conversation belongs to a subagent if the main one waits for it and continues, or if it has other tools; so does a
    fork whose last reply the conversation uses. A conversation that continues after a summary is the same agent's.
    """
    conversations = _conversations(threads, compactions)
    conversations = [each for each in conversations if each[0].first.id not in asides]
    if not conversations:
        return {}
    main = next((each for each in conversations if each[0].toolsets), conversations[0])
    last = max((thread.calls[-1] for thread in main), key=lambda node: node.id)
    agents: dict[str, str] = {}
    count = 0
    for conversation in conversations:
        first = conversation[0]
        if conversation is main or first.first.id < main[0].first.id or first.first.call.agent:
            continue
        if bool(first.toolsets) != bool(main[0].toolsets):
            continue
        other_tools = bool(first.toolsets) and not first.toolsets & main[0].toolsets
        waits = last.id > first.first.id and (last.id in threads.before or len(main) > 1)
        if other_tools or waits:
            count += 1
            agents.update((node.id, SUBAGENT.format(count)) for thread in conversation for node in thread.calls)
    agents.update((call_id, SUBAGENT.format(count + 1 + number)) for call_id, number in forks.used.items())
    return agents


def _conversations(threads: Threads, compactions: Mapping[str, PrefixNode]) -> list[list[Thread]]:
    """The threads of each agent's conversation: one, and those that continue it after summaries."""
    heads: dict[int, list[Thread]] = {}
    joined: dict[int, Thread] = {}
    for call_id, next_node in compactions.items():
        thread = threads.by_call[next_node.id]
        if thread.first is next_node:
            continued = compacted_thread(call_id, next_node, threads)
            if continued is not None and continued is not thread:
                joined[id(thread)] = continued
    for thread in threads.threads:
        earlier = joined.get(id(thread))
        conversation = heads.get(id(earlier)) if earlier is not None else None
        if conversation is None:
            conversation = []
        conversation.append(thread)
        heads[id(thread)] = conversation
    return list({id(each): each for each in heads.values()}.values())
