"""What each call was for, decided from the whole session. The rules, in order; the first that holds decides:

1. `session`: the session belongs to a judge or a simulated user.
2. `stated`: the policy is a frozen helper, or the harness's own header names the purpose.
3. `role`: the session's owner gave the caller a role, whose calls are the agent's.
4. `replaces_history`: a summary. Nothing goes on from the reply; the next call of the same agent has a shorter history,
   and quotes the reply or was preceded by this call without tools.
5. `aside`: a side call. The session's agent offers tools, this call offers none, and nothing goes on from it. Where no
   call offers tools: a request of its own that nothing goes on from, beside a conversation of several calls, and for
   another model or delivered otherwise (streamed or whole) than any call of that conversation.
6. `agent`: everything else. So in a session that never offers tools nearly every call is the agent's.

What a reply quotes does not count; what a later prompt quotes does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from rolltap.reconstructor.forest import PrefixNode, TokenForest
from rolltap.reconstructor.threads import Thread, Threads, threads_of
from rolltap.types import BreakReason, CallKind

SUBAGENT = "subagent-{}"
"""Name of an agent that no header names: the number of its conversation within the session."""


class KindRule(StrEnum):
    """The rule that decided what a call was for."""

    SESSION = "session"
    STATED = "stated"
    ROLE = "role"
    REPLACES_HISTORY = "replaces_history"
    ASIDE = "aside"
    AGENT = "agent"


@dataclass(frozen=True, slots=True)
class Purpose:
    """A call's kind, the rule that decided it, and the agent that made the call ("" is the main one)."""

    kind: CallKind
    rule: KindRule
    agent: str


@dataclass(frozen=True, slots=True, eq=False)
class Purposes:
    """The purpose of each call by id, and the calls that go on behind a summary of what was before."""

    by_call: Mapping[str, Purpose]
    compacted: frozenset[str]


def purposes_of(forest: TokenForest) -> Purposes:
    """Applies the rules to a whole session."""
    threads = threads_of(forest)
    summaries = _summaries(forest, threads)
    agents = _agents(threads)
    offers_tools = any(node.call.shape.tools for node in forest)
    by_call: dict[str, Purpose] = {}
    for node in forest:
        kind, rule = _stated(node) or (CallKind.MAIN, KindRule.AGENT)
        if rule is KindRule.AGENT and node.id in summaries:
            kind, rule = CallKind.SUMMARY, KindRule.REPLACES_HISTORY
        elif rule is KindRule.AGENT and (_is_aside(node, threads) if offers_tools else _is_apart(node, threads)):
            kind, rule = CallKind.AUXILIARY, KindRule.ASIDE
        agent = agents.get(node.id, "") if kind is CallKind.MAIN else ""
        by_call[node.id] = Purpose(kind, rule, node.call.agent or agent)
    stated = (node.id for node in forest if _follows_stated_summary(forest, node, by_call))
    return Purposes(by_call, frozenset([*summaries.values(), *stated]))


def _stated(node: PrefixNode) -> tuple[CallKind, KindRule] | None:
    """What is known of the call without looking at the others."""
    call = node.call
    if call.kind in (CallKind.JUDGE, CallKind.SIMULATOR):
        return call.kind, KindRule.SESSION
    if call.kind is not CallKind.MAIN:
        return call.kind, KindRule.STATED
    return (CallKind.MAIN, KindRule.ROLE) if call.shape.role else None


def _follows_stated_summary(forest: TokenForest, node: PrefixNode, by_call: Mapping[str, Purpose]) -> bool:
    """Whether a recorded compaction names a call whose header says that it wrote the summary."""
    recorded = node.call.break_
    if recorded is None or recorded.reason is not BreakReason.COMPACTION:
        return False
    named = [forest.get(call_id) for call_id in (recorded.parent_id, node.call.parent_id, *node.call.shape.quotes)]
    return any(each is not None and by_call[each.id].kind is CallKind.SUMMARY for each in named)


def _is_aside(node: PrefixNode, threads: Threads) -> bool:
    """Whether a call without tools, which nothing goes on from, stands beside the agent's conversation.

    One that was shown the agent's replies is the agent's last word with its tools withheld, unless the conversation
    went on without it.
    """
    if node.call.shape.tools != 0 or node.id in threads.followers:
        return False
    thread = threads.by_call[node.id]
    if len(thread.calls) == 1 or threads.depths[node.id] == 0:
        return True
    return bool(thread.toolsets) and thread.calls[-1] is not node


def _is_apart(node: PrefixNode, threads: Threads) -> bool:
    """Whether a call, in a session without tools, is a request of its own made in another manner than the longest
    conversation's: what a harness asks beside its agent (a commit message, a name) often goes another way.
    """
    manner = node.call.shape.manner
    conversation = max(threads.threads, key=lambda thread: len(thread.calls))
    if not manner or len(threads.by_call[node.id].calls) > 1 or len(conversation.calls) < 2:
        return False
    return all(other.call.shape.manner not in ("", manner) for other in conversation.calls)


def _summaries(forest: TokenForest, threads: Threads) -> dict[str, str]:
    """By the id of a call whose reply replaced a history, the call that goes on behind it."""
    found: dict[str, str] = {}
    nodes = forest.nodes
    for position, later in enumerate(nodes):
        if later.parent is not None or (later.id in threads.before and later.call.shape.replies):
            continue
        named = [forest.get(call_id) for call_id in later.call.shape.quotes]
        previous = nodes[position - 1] if position else None
        for node in [*named, previous]:
            if node is None or node.id >= later.id or node.id in threads.followers or node.id in found:
                continue
            quoted = node.id in later.call.shape.quotes
            if (quoted or node.call.shape.tools == 0) and _replaces(node, later, threads):
                found[node.id] = later.id
    return found


def _replaces(node: PrefixNode, later: PrefixNode, threads: Threads) -> bool:
    """Whether `later` is the same agent's call with a shorter history than the one that `node` was shown."""
    thread = threads.by_call[node.id]
    shown = threads.depths[node.id] > threads.depths[later.id]
    if not thread.toolsets and later.call.shape.tools:  # a history pasted into one message, without tools
        earlier = [other for other in threads.threads if other.first.id < node.id]
        return node.id in later.call.shape.quotes and any(later.call.shape.toolset in o.toolsets for o in earlier)
    if thread.toolsets:
        return shown and later.call.shape.toolset in thread.toolsets
    return shown and node.id in later.call.shape.quotes and later.call.shape.system in thread.systems


def _agents(threads: Threads) -> dict[str, str]:
    """Names for the subagents that no header names, by call.

    A conversation is a subagent's if the main one waits for it and goes on, or if it is offered other tools.
    """
    main = next((thread for thread in threads.threads if thread.toolsets), None) or next(iter(threads.threads), None)
    agents: dict[str, str] = {}
    count = 0
    for thread in threads.threads:
        if main is None or thread is main or thread.first.id < main.first.id or thread.first.call.agent:
            continue
        if bool(thread.toolsets) != bool(main.toolsets):
            continue
        other_tools = bool(thread.toolsets) and not thread.toolsets & main.toolsets
        if other_tools or _goes_on_after(main, thread, threads):
            count += 1
            agents.update((node.id, SUBAGENT.format(count)) for node in thread.calls)
    return agents


def _goes_on_after(main: Thread, thread: Thread, threads: Threads) -> bool:
    """Whether the main conversation waits while `thread` begins, and goes on later."""
    last = main.calls[-1]
    return last.id > thread.first.id and last.id in threads.before
