"""Decides each call's kind from the whole session. The first rule that holds decides:

1. `session`: the session belongs to a judge or a simulated user.
2. `stated`: the policy is a frozen helper, or the harness's header states the purpose.
3. `role`: the session's owner gave the caller a role, whose calls are the agent's.
4. `replaces_history`: a summary. No call continues the reply. The next call of the same agent has a shorter history,
   and it quotes the reply or follows this call, which has no tools. If that next call still has the last replies
   unchanged, its history counts as shorter if some earlier replies are missing, or if it continues no call and quotes a
   reply that was requested without tools. A discarded attempt at a summary after the same reply is a summary too.
5. `aside`: a side call. The session's agent offers tools, this call offers none, and no call continues it. If no call
   offers tools: a separate request without continuation beside a conversation of several calls, for another model or
   with another delivery (streamed or whole) than every call of that conversation.
6. `agent`: all other calls. So in a session without tools nearly every call is the agent's.

Only quotes in later prompts count, not quotes in replies.
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
"""Name of an agent without a name in a header: the number of its conversation within the session."""

REPLY_END, STANDS = 32, 0.5
"""A later prompt contains a reply if it contains half of the reply's last tokens, of which this many are compared."""


class KindRule(StrEnum):
    """The rule that decided a call's kind."""

    SESSION = "session"
    STATED = "stated"
    ROLE = "role"
    REPLACES_HISTORY = "replaces_history"
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
    """The kind and rule if the call alone decides them."""
    call = node.call
    if call.kind in (CallKind.JUDGE, CallKind.SIMULATOR):
        return call.kind, KindRule.SESSION
    if call.kind is not CallKind.MAIN:
        return call.kind, KindRule.STATED
    return (CallKind.MAIN, KindRule.ROLE) if call.shape.role else None


def _follows_stated_summary(forest: TokenForest, node: PrefixNode, by_call: Mapping[str, Purpose]) -> bool:
    """Whether a recorded compaction names a call whose header states that it is a summary."""
    recorded = node.call.break_
    if recorded is None or recorded.reason is not BreakReason.COMPACTION:
        return False
    named = [forest.get(call_id) for call_id in (recorded.parent_id, node.call.parent_id, *node.call.shape.quotes)]
    return any(call is not None and by_call[call.id].kind is CallKind.SUMMARY for call in named)


def _is_aside(node: PrefixNode, threads: Threads) -> bool:
    """Whether a call without tools and without continuation is a side call.

    A call whose prompt has the agent's replies is the agent's last call, with tools withheld, unless the conversation
    continued without it.
    """
    if node.call.shape.tools != 0 or node.id in threads.followers:
        return False
    thread = threads.by_call[node.id]
    if len(thread.calls) == 1 or threads.depths[node.id] == 0:
        return True
    return bool(thread.toolsets) and thread.calls[-1] is not node


def _is_apart(node: PrefixNode, threads: Threads) -> bool:
    """Whether a call in a session without tools is a separate request, made in another way than the longest
    conversation's calls. Harnesses often send side calls (a commit message, a name) in another way.
    """
    manner = node.call.shape.manner
    conversation = max(threads.threads, key=lambda thread: len(thread.calls))
    if not manner or len(threads.by_call[node.id].calls) > 1 or len(conversation.calls) < 2:
        return False
    return all(other.call.shape.manner not in ("", manner) for other in conversation.calls)


def _summaries(forest: TokenForest, threads: Threads) -> dict[str, str]:
    """The calls whose reply replaced a history, by id, with the call that continues after it."""
    summaries: dict[str, str] = {}
    nodes = forest.nodes
    for position, next_node in enumerate(nodes):
        if next_node.parent is not None:
            continue
        retained_node = _kept_beside_a_summary(forest, next_node, threads)
        is_continuation = next_node.id in threads.before and next_node.call.shape.replies
        named = [forest.get(call_id) for call_id in next_node.call.shape.quotes]
        previous = nodes[position - 1] if position else None
        for node in [*named, previous]:
            if node is None or node.id >= next_node.id or node.id in threads.followers or node.id in summaries:
                continue
            quoted = node.id in next_node.call.shape.quotes
            pasted = retained_node is not None and not threads.by_call[node.id].toolsets
            if is_continuation and not (
                quoted and (pasted or threads.by_call[node.id] is threads.by_call[next_node.id])
            ):
                continue
            if (quoted or node.call.shape.tools == 0) and _replaces(node, next_node, retained_node, threads):
                summaries[node.id] = next_node.id
                summaries.update(
                    (call.id, next_node.id) for call in _thrown_away(node, next_node, retained_node, threads)
                )
    return summaries


def _kept_beside_a_summary(forest: TokenForest, next_node: PrefixNode, threads: Threads) -> PrefixNode | None:
    """The call whose reply `next_node` seems to contain without all of the earlier replies."""
    recorded = next_node.call.break_
    retained_node = forest.get(recorded.parent_id) if recorded is not None else None
    if retained_node is None or not 0 < threads.depths[next_node.id] <= threads.depths[retained_node.id]:
        return None
    return retained_node


def _replaces(node: PrefixNode, next_node: PrefixNode, retained_node: PrefixNode | None, threads: Threads) -> bool:
    """Whether `next_node` is a call of the same agent with a shorter history than `node`'s."""
    thread = threads.by_call[node.id]
    quoted = node.id in next_node.call.shape.quotes
    has_longer_history = threads.depths[node.id] > threads.depths[next_node.id]
    if not thread.toolsets and next_node.call.shape.tools:  # a history pasted into one message, without tools
        earlier = [other for other in threads.threads if other.first.id < node.id]
        return quoted and any(next_node.call.shape.toolset in other.toolsets for other in earlier)
    if thread.toolsets:
        lacks_some = retained_node is not None and threads.by_call[retained_node.id] is thread
        withheld = node.call.shape.tools == 0 and next_node.id not in threads.before
        if quoted and (lacks_some or withheld):
            has_longer_history = threads.depths[node.id] > 0
        return has_longer_history and next_node.call.shape.toolset in thread.toolsets
    return has_longer_history and quoted and next_node.call.shape.system in thread.systems


def _thrown_away(
    summary: PrefixNode, next_node: PrefixNode, retained_node: PrefixNode | None, threads: Threads
) -> list[PrefixNode]:
    """Discarded attempts at `summary` after the same reply: no call continues them, and `next_node` lacks their reply.

    Only the end of a reply is compared, as its thinking may have been dropped.
    """
    tries = summary.parent.children if summary.parent is not None else []
    return [
        node
        for node in tries
        if node.id < summary.id and node is not retained_node and node.id not in threads.followers
        if node.call.agent == summary.call.agent and len(node.call.output_ids)
        if quoted_share(next_node.call.prompt_ids, node.call.output_ids[-REPLY_END:]) < STANDS
    ]


def _agents(threads: Threads) -> dict[str, str]:
    """Names for subagents without a name in a header, by call.

    A conversation belongs to a subagent if the main one waits for it and continues, or if it has other tools.
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
    """Whether the main conversation waits while `thread` begins, and continues later."""
    last = main.calls[-1]
    return last.id > thread.first.id and last.id in threads.before
