"""What each call was for, decided from the whole session. The rules, in order; the first that holds decides:

1. `session`: the session belongs to a judge or a simulated user.
2. `stated`: the policy is a frozen helper, or the harness's own header names the purpose.
3. `role`: the session's owner gave the caller a role, whose calls are the agent's.
4. `replaces_history`: a summary. Nothing goes on from the reply; the next call of the same agent has a shorter history,
   and quotes the reply or was preceded by this call without tools. Where that call holds the last replies as they
   were, it is shorter if it lacks some of those before them, or if it goes on from none and quotes a reply that was
   asked for without tools. A try for a summary, asked for behind the same reply and thrown away, is one too.
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
from rolltap.reconstructor.siblings import quoted_share
from rolltap.reconstructor.threads import Thread, Threads, threads_of
from rolltap.types import BreakReason, CallKind

SUBAGENT = "subagent-{}"
"""Name of an agent that no header names: the number of its conversation within the session."""

REPLY_END, STANDS = 32, 0.5
"""A reply stands in a later prompt if half of its last tokens, this many, do."""


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
    summaries: dict[str, str] = {}
    nodes = forest.nodes
    for position, later in enumerate(nodes):
        if later.parent is not None:
            continue
        kept = _kept_beside_a_summary(forest, later, threads)
        goes_on = later.id in threads.before and later.call.shape.replies
        named = [forest.get(call_id) for call_id in later.call.shape.quotes]
        previous = nodes[position - 1] if position else None
        for node in [*named, previous]:
            if node is None or node.id >= later.id or node.id in threads.followers or node.id in summaries:
                continue
            quoted = node.id in later.call.shape.quotes
            pasted = kept is not None and not threads.by_call[node.id].toolsets
            if goes_on and not (quoted and (pasted or threads.by_call[node.id] is threads.by_call[later.id])):
                continue
            if (quoted or node.call.shape.tools == 0) and _replaces(node, later, kept, threads):
                summaries[node.id] = later.id
                summaries.update((each.id, later.id) for each in _thrown_away(node, later, kept, threads))
    return summaries


def _kept_beside_a_summary(forest: TokenForest, later: PrefixNode, threads: Threads) -> PrefixNode | None:
    """The call whose reply `later` seems to hold without all the replies that were before it."""
    recorded = later.call.break_
    kept = forest.get(recorded.parent_id) if recorded is not None else None
    return kept if kept is not None and 0 < threads.depths[later.id] <= threads.depths[kept.id] else None


def _replaces(node: PrefixNode, later: PrefixNode, kept: PrefixNode | None, threads: Threads) -> bool:
    """Whether `later` is the same agent's call with a shorter history than the one that `node` was shown."""
    thread = threads.by_call[node.id]
    quoted = node.id in later.call.shape.quotes
    shown = threads.depths[node.id] > threads.depths[later.id]
    if not thread.toolsets and later.call.shape.tools:  # a history pasted into one message, without tools
        earlier = [other for other in threads.threads if other.first.id < node.id]
        return quoted and any(later.call.shape.toolset in other.toolsets for other in earlier)
    if thread.toolsets:
        lacks_some = kept is not None and threads.by_call[kept.id] is thread
        withheld = node.call.shape.tools == 0 and later.id not in threads.before
        if quoted and (lacks_some or withheld):
            shown = threads.depths[node.id] > 0
        return shown and later.call.shape.toolset in thread.toolsets
    return shown and quoted and later.call.shape.system in thread.systems


def _thrown_away(summary: PrefixNode, later: PrefixNode, kept: PrefixNode | None, threads: Threads) -> list[PrefixNode]:
    """Tries for `summary`, from the same reply on, that nothing goes on from and whose reply `later` does not hold.

    Of a reply that `later` holds, what stands last does so even where its thinking was dropped.
    """
    tries = summary.parent.children if summary.parent is not None else []
    return [
        node
        for node in tries
        if node.id < summary.id and node is not kept and node.id not in threads.followers
        if node.call.agent == summary.call.agent and len(node.call.output_ids)
        if quoted_share(later.call.prompt_ids, node.call.output_ids[-REPLY_END:]) < STANDS
    ]


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
