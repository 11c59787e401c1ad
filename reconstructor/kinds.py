"""Decides each call's kind from the whole session. The first rule that holds decides:

1. `session`: the session belongs to a judge or a simulated user.
2. `stated`: the policy is a frozen helper, or the harness's header states the purpose.
3. `role`: the session's owner gave the caller a role, whose calls are the agent's.
4. `replaces_history`: a summary, whose reply replaced a history, or an attempt at one that the harness discarded.
5. `side_branch`: a call of a branch that the conversation goes on without.
6. `aside`: a side call that is a request of its own, or sees the conversation without its tools.
7. `agent`: all other calls. So in a session without tools nearly every call is the agent's.

Only quotes in later prompts count, not quotes in replies.

Summaries: a pipeline's next stage quotes the last stage's answer as a compacted history quotes its summary. A
compaction differs in two ways: the agent keeps its tools and its system text, and the summary was asked for in a
message of its own, whereas an answer follows the result of a tool.

Branches: a branch is a call that continues another one, with all calls that continue it. Where several branches
continue one call, the conversation's own branch is the one that was continued further; the others are its side
branches.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from rolltap.reconstructor.forest import PrefixNode, TokenForest, common_prefix
from rolltap.reconstructor.threads import Thread, Threads, quoted_share, stands_in, threads_of
from rolltap.types import BreakReason, CallKind, Finish, Outcome

SUBAGENT = "subagent-{}"
"""Name of an agent without a name in a header: the number of its conversation within the session."""


class KindRule(StrEnum):
    """The rule that decided a call's kind."""

    SESSION = "session"
    STATED = "stated"
    ROLE = "role"
    REPLACES_HISTORY = "replaces_history"
    SIDE_BRANCH = "side_branch"
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
    sides = side_branches_of(forest, threads, summaries)
    asides = asides_of(forest, threads, summaries)
    compactions = {**summaries, **_stated_summaries(forest, summaries)}
    agents = _agents(threads, compactions, sides, asides)
    by_call: dict[str, Purpose] = {}
    for node in forest:
        kind, rule = _stated(node) or (CallKind.MAIN, KindRule.AGENT)
        if rule is KindRule.AGENT and node.id in summaries:
            kind, rule = CallKind.SUMMARY, KindRule.REPLACES_HISTORY
        elif rule is KindRule.AGENT and node.id in sides.side:
            kind, rule = CallKind.AUXILIARY, KindRule.SIDE_BRANCH
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
    threads: Threads, compactions: Mapping[str, PrefixNode], sides: SideBranches, asides: Container[str]
) -> dict[str, str]:
    """Names for subagents without a name in a header, by call.

    A conversation belongs to a subagent if the main one waits for it and continues, or if it has other tools; so does a
    branch whose last reply the conversation uses. A conversation that continues after a summary is the same agent's.
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
    agents.update((call_id, SUBAGENT.format(count + 1 + number)) for call_id, number in sides.used.items())
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


PROMPT_END = 24
"""The number of ids at the end of two prompts by which their last messages are compared."""


def summaries_of(forest: TokenForest, threads: Threads) -> dict[str, PrefixNode]:
    """The calls whose reply replaced a history, and discarded attempts at them, with the call that continues then."""
    summaries: dict[str, PrefixNode] = {}
    for position, next_node in enumerate(forest.nodes):
        if next_node.parent is not None and next_node.call.break_ is None:
            continue
        retained = _retained_beside_a_summary(forest, next_node, threads)
        named = [forest.get(call_id) for call_id in next_node.call.shape.quotes]
        previous = forest.nodes[position - 1] if position else None
        for node in [*named, previous]:
            if node is None or node.id >= next_node.id or node.id in threads.followers or node.id in summaries:
                continue
            if _may_replace(node, next_node, retained, threads) and _replaces(node, next_node, retained, threads):
                tries = _discarded_attempts(forest, node, next_node, retained, threads)
                summaries.update((call.id, next_node) for call in (node, *tries))
    return summaries


def compacted_thread(summary_id: str, next_node: PrefixNode, threads: Threads) -> Thread | None:
    """The thread whose history a summary replaced: its own, the next call's, or the latest earlier one like that."""
    thread, own = threads.by_call[summary_id], threads.by_call[next_node.id]
    if thread.toolsets or not next_node.call.shape.tools:
        return thread
    if own.first.id < summary_id:
        return own
    agent, alike = next_node.call.agent, None
    for at in range(bisect_left(threads.threads, summary_id, key=lambda each: each.first.id) - 1, -1, -1):
        each = threads.threads[at]
        if each.first.call.agent == agent and each.has_frame_of(next_node):
            if len(each.calls) > 1:
                return each
            alike = alike or each
    return alike


def _may_replace(node: PrefixNode, next_node: PrefixNode, retained: PrefixNode | None, threads: Threads) -> bool:
    """Whether `node` is quoted in `next_node` or is a call without tools right before it, as summaries are.

    A call that continues a recorded reply replaces no history unless it quotes a summary of the same thread.
    """
    quoted = node.id in next_node.call.shape.quotes
    if node.call.shape.ends == "tool" or not (quoted or node.call.shape.tools == 0):
        return False
    earlier = threads.before.get(node.id)
    if earlier is not None and _ends_alike(node, earlier):
        return False
    if next_node.id not in threads.before or not next_node.call.shape.replies:
        return True
    replaced = retained is not None or _lacks_a_beginning(next_node, threads.before)
    pasted = replaced and not threads.by_call[node.id].toolsets
    return quoted and (pasted or threads.by_call[node.id] is threads.by_call[next_node.id])


def _ends_alike(node: PrefixNode, earlier: PrefixNode) -> bool:
    """Whether two prompts end with the same message: a reminder that follows each of the agent's tool results."""
    if earlier.call.finish is not Finish.TOOL_CALLS or _frame(node) != _frame(earlier):
        return False
    return np.array_equal(node.call.prompt_ids[-PROMPT_END:], earlier.call.prompt_ids[-PROMPT_END:])


def _retained_beside_a_summary(forest: TokenForest, next_node: PrefixNode, threads: Threads) -> PrefixNode | None:
    """The call whose reply `next_node` seems to contain without all of the earlier replies."""
    recorded = next_node.call.break_
    retained = threads.before.get(next_node.id) or forest.get(recorded.parent_id if recorded is not None else None)
    if retained is None or not 0 < threads.depths[next_node.id] <= threads.depths[retained.id]:
        return None
    return retained


def _replaces(node: PrefixNode, next_node: PrefixNode, retained: PrefixNode | None, threads: Threads) -> bool:
    """Whether `next_node` is a call of the same agent with a shorter history than `node`'s."""
    thread = threads.by_call[node.id]
    quoted = node.id in next_node.call.shape.quotes
    has_longer_history = threads.depths[node.id] > threads.depths[next_node.id]
    if not thread.toolsets and next_node.call.shape.tools:  # a history pasted into one message, without tools
        earlier = (other for other in threads.threads if other.first.id < node.id)
        return quoted and any(other.has_frame_of(next_node) for other in earlier)
    if thread.toolsets:
        lacks_some = retained is not None and threads.by_call[retained.id] is thread
        withheld = node.call.shape.tools == 0 and _lacks_a_beginning(next_node, threads.before)
        if quoted and (lacks_some or withheld):
            has_longer_history = threads.depths[node.id] > 0
        return has_longer_history and bool(next_node.call.shape.tools) and thread.has_frame_of(next_node)
    return has_longer_history and quoted and next_node.call.shape.system in thread.systems.get("", ())


def _lacks_a_beginning(node: PrefixNode, before: Mapping[str, PrefixNode]) -> bool:
    """Whether the history before the last recorded reply in `node`'s history was replaced, or no reply is recorded."""
    earlier = before.get(node.id)
    if earlier is None:
        return True
    shared = common_prefix(node.call, earlier.call)
    return _frame(node) == _frame(earlier) and shared < len(earlier.call.prompt_ids)


def _discarded_attempts(
    forest: TokenForest, summary: PrefixNode, next_node: PrefixNode, retained: PrefixNode | None, threads: Threads
) -> Iterable[PrefixNode]:
    """Discarded attempts at `summary`, before or after it: no call continues them, and `next_node` lacks their reply.

    An attempt was asked after the same reply as the summary, in its frame or in the conversation's. If the history was
    pasted into the summary's request, an attempt is a request like it, or was asked after the last reply that the
    compacted conversation continued, and the pasted history lacks its reply.
    """
    asked_after, tries = threads.before.get(summary.id), []
    if asked_after is not None:
        tries = threads.followers[asked_after.id]
    elif (thread := compacted_thread(summary.id, next_node, threads)) is not None:
        asked_after = _last_replaced(thread, summary, next_node, threads)
        if asked_after is not None:
            within = threads.followers[asked_after.id]
            alike = forest.nodes[forest.position(asked_after.id) : forest.position(next_node.id)]
            tries = [node for node in within if _is_lacking(summary, node)]
            tries += [node for node in alike if node.id not in threads.before and _frame(node) == _frame(summary)]
    if asked_after is None:
        return
    for node in tries:
        if node is summary or node is retained or node.id >= next_node.id or node.id in threads.followers:
            continue
        if node.call.shape.ends == "tool" or node.call.agent != summary.call.agent:
            continue
        if _frame(node) != _frame(summary) and not _has_frame_of(asked_after, node, threads):
            continue
        if len(node.call.output_ids) and not stands_in(next_node.call.prompt_ids, node.call):
            yield node


def _last_replaced(thread: Thread, summary: PrefixNode, next_node: PrefixNode, threads: Threads) -> PrefixNode | None:
    """The last call of a thread whose reply a summary with a pasted history replaced: the one before the replies that
    the next call still has, or the last one that was continued."""
    node = threads.before.get(next_node.id)
    if node is None:
        earlier = range(bisect_left(thread.calls, summary.id, key=lambda each: each.id) - 1, -1, -1)
        return next((thread.calls[at] for at in earlier if thread.calls[at].id in threads.followers), None)
    for _ in range(threads.depths[next_node.id]):
        node = threads.before.get(node.id) if node is not None else None
    return node


def _is_lacking(summary: PrefixNode, node: PrefixNode) -> bool:
    """Whether a pasted history lacks a reply. Tool calls are pasted in another form, so nothing is known of them."""
    return node.call.finish is not Finish.TOOL_CALLS and not stands_in(summary.call.prompt_ids, node.call)


def _has_frame_of(earlier: PrefixNode, node: PrefixNode, threads: Threads) -> bool:
    """Whether `node` offers the tools of `earlier` after a system text of its thread."""
    return earlier.call.shape.toolset == node.call.shape.toolset and threads.by_call[earlier.id].has_frame_of(node)


def _frame(node: PrefixNode) -> tuple[str, str]:
    return node.call.shape.toolset, node.call.shape.system


ABOUT = 0.8
"""A request is about the same task as another one if it contains this share of the other one's own text."""


@dataclass(frozen=True, slots=True, eq=False)
class SideBranches:
    """The calls of branches that the conversation goes on without.

    `side`: those of side agents and single side calls. `used`: by call id, the number of a branch whose last reply the
    conversation quotes as a tool's result: a subagent that was given the history.
    """

    side: frozenset[str]
    used: Mapping[str, int]


def side_branches_of(forest: TokenForest, threads: Threads, summaries: Mapping[str, PrefixNode]) -> SideBranches:
    """Finds the side branches of a session. They are judged only if it is on record what their requests end with."""
    extents = _extents(forest, threads)
    compacted = {node.id for node in summaries.values()}
    quoting = _quoting(forest)
    repeated = _repeated(forest)
    side: set[str] = set()
    used: dict[str, int] = {}
    branches = 0
    for node in forest:
        if node.id in side or node.id in used:
            continue
        for branch, own in _side_branches_at(node, threads, summaries, extents):
            goes_on = own is not None and extents[own.id].alike > branch.id
            if own is not None and branch.id < own.id:  # a summary may have replaced it
                goes_on &= own.id not in compacted and threads.depths[own.id] > threads.depths[node.id]
            extent = extents[branch.id]
            if node.call.finish is Finish.TOOL_CALLS and extent.latest in quoting:
                used.update((each.id, branches) for each in _branch(branch, threads))
                branches += 1
            elif branch.call.shape.toolset != node.call.shape.toolset:
                if goes_on or _ends_apart(branch, node):
                    toolsets = {each.id: each.call.shape.toolset for each in _branch(branch, threads)}
                    if node.call.shape.toolset not in toolsets.values():
                        side |= toolsets.keys()
            elif goes_on and extent.calls == 1 and branch.id not in repeated and _is_completed(branch):
                side.add(branch.id)
    return SideBranches(frozenset(side), used)


@dataclass(slots=True)
class _Extent:
    """How far a call's branch reaches: its number of calls, its latest call, and the latest that is reached by calls
    with the same tools."""

    calls: int
    latest: str
    alike: str


def _extents(forest: TokenForest, threads: Threads) -> dict[str, _Extent]:
    extents = {node.id: _Extent(1, node.id, node.id) for node in forest}
    for node in reversed(forest.nodes):
        earlier, extent = threads.before.get(node.id), extents[node.id]
        if earlier is not None:
            outer = extents[earlier.id]
            outer.calls += extent.calls
            outer.latest = max(outer.latest, extent.latest)
            if earlier.call.shape.toolset == node.call.shape.toolset:
                outer.alike = max(outer.alike, extent.alike)
    return extents


def _repeated(forest: TokenForest) -> set[str]:
    """The calls whose prompt was asked more than once: which sample counts is decided among these siblings."""
    return {node.id for siblings in forest.siblings() if len(siblings) > 1 for node in siblings}


def _is_completed(node: PrefixNode) -> bool:
    return node.call.outcome is Outcome.COMPLETED


def _quoting(forest: TokenForest) -> dict[str, PrefixNode]:
    """By call id, the last call with tools that quotes its reply."""
    return {call_id: node for node in forest if node.call.shape.tools for call_id in node.call.shape.quotes}


def _side_branches_at(
    node: PrefixNode, threads: Threads, summaries: Container[str], extents: Mapping[str, _Extent]
) -> Iterator[tuple[PrefixNode, PrefixNode | None]]:
    """The side branches among those that continue `node`, and the conversation's own branch.

    Only calls that offer tools are compared, and only if it is certain that they continue `node`.
    """
    branches = [
        each
        for each in threads.followers.get(node.id, ())
        if each.call.shape.tools and each.call.shape.ends and each.id not in summaries
        if each.call.agent == node.call.agent and node.call.shape.tools
        if each.parent is node or each.call.shape.follows == node.id
    ]
    alike_branches = [each for each in branches if each.call.shape.toolset == node.call.shape.toolset]
    own = max(alike_branches, key=lambda each: _is_own(each, node, threads, extents), default=None)
    for branch in branches:
        if branch is not own:
            yield branch, own


def _is_own(
    branch: PrefixNode, node: PrefixNode, threads: Threads, extents: Mapping[str, _Extent]
) -> tuple[bool, bool, str]:
    """Sort key of the branches that continue `node`: the conversation's own one answers the tools that `node` called,
    was continued itself, or came last."""
    answers = node.call.finish is Finish.TOOL_CALLS and branch.call.shape.ends == "tool"
    return answers, branch.id in threads.followers, extents[branch.id].alike


def _branch(branch: PrefixNode, threads: Threads) -> Iterator[PrefixNode]:
    """A branch's calls."""
    waiting = [branch]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += threads.followers.get(node.id, ())


def _ends_apart(branch: PrefixNode, node: PrefixNode) -> bool:
    """Whether a session's last branch is a side agent's: `node` had answered, and fewer tools and another system text
    are not how the same agent goes on."""
    mine, theirs = branch.call.shape, node.call.shape
    answered = node.call.finish is Finish.STOP and mine.ends == "user"
    return answered and (mine.tools or 0) < (theirs.tools or 0) and mine.system != theirs.system


def asides_of(forest: TokenForest, threads: Threads, summaries: Container[str]) -> frozenset[str]:
    """The side calls that are requests of their own, or that see the conversation without its tools."""
    if any(node.call.shape.tools for node in forest):
        return _beside_an_agent_with_tools(forest, threads, summaries)
    return _beside_an_agent_without_tools(forest, threads)


def _beside_an_agent_with_tools(forest: TokenForest, threads: Threads, summaries: Container[str]) -> frozenset[str]:
    asides: set[str] = set()
    systems: set[str] = set()  # of side calls and summaries that have the conversation's replies and no tools
    for node in forest:
        if node.call.shape.tools == 0 and node.id not in threads.followers:
            if node.id not in summaries and (_is_aside(node, threads) or _ends_aside(node, threads, systems)):
                asides.add(node.id)
            if (node.id in asides or node.id in summaries) and threads.depths[node.id]:
                systems.add(node.call.shape.system)
    return frozenset(asides.union(_unused(forest, threads)))


def _is_aside(node: PrefixNode, threads: Threads) -> bool:
    """Whether a call without tools and without continuation is a side call.

    A call whose prompt has the agent's replies is the agent's last call, with tools withheld, unless the conversation
    continued without it.
    """
    thread = threads.by_call[node.id]
    if len(thread.calls) == 1 or threads.depths[node.id] == 0:
        return True
    return bool(thread.toolsets) and thread.calls[-1] is not node


def _ends_aside(node: PrefixNode, threads: Threads, systems: Container[str]) -> bool:
    """Whether the last call of a conversation is a side call without tools: earlier side calls had its system text, or
    the agent had given its answer and another system text asks something more."""
    earlier = threads.before.get(node.id)
    if earlier is None or not earlier.call.shape.tools or node.call.shape.ends != "user":
        return False
    mine, theirs = node.call.shape.system, earlier.call.shape.system
    return mine in systems or (mine != theirs and earlier.call.finish is Finish.STOP)


def _unused(forest: TokenForest, threads: Threads) -> Iterator[str]:
    """Single requests of their own with tools that they call none of, and whose reply nobody uses, while a conversation
    goes on: a title for its task, asked with its tools.

    The next stage of a pipeline quotes the last one's reply. Questions that are asked one by one have the system text
    of the others.
    """
    single = [
        thread.first
        for thread in threads.threads
        if len(thread.calls) == 1 and thread.first.call.shape.ends and thread.first.call.shape.tools
        if thread.first.call.finish is not Finish.TOOL_CALLS and not thread.first.call.agent
        if not thread.first.call.shape.replies and _is_completed(thread.first)
    ]
    longer = [thread for thread in threads.threads if len(thread.calls) > 1 and thread.toolsets]
    if not single or not longer:
        return
    main = max(longer, key=lambda thread: thread.calls[-1].id)
    quoting, repeated = _quoting(forest), _repeated(forest)
    for node in single:
        if node.id in quoting or node.id in repeated or node.id > main.calls[-1].id:
            continue
        if not main.has_frame_of(node) or _is_about(node, main.first):
            yield node.id


def _is_about(node: PrefixNode, first: PrefixNode) -> bool:
    """Whether a request contains what a conversation's `first` request has beside the frame that they share."""
    own = first.call.prompt_ids[common_prefix(node.call, first.call) :]
    return len(own) > 0 and quoted_share(node.call.prompt_ids, own) >= ABOUT


def _beside_an_agent_without_tools(forest: TokenForest, threads: Threads) -> frozenset[str]:
    """Single requests beside the longest conversation: made in another way, or while it goes on under another system
    text and with a reply that nobody quotes; and their like."""
    conversation = max(threads.threads, key=lambda thread: len(thread.calls), default=Thread())
    single = [thread.first for thread in threads.threads if len(thread.calls) == 1]
    quoted = {call_id for node in forest for call_id in node.call.shape.quotes}
    asides = {
        node.id for node in single if _is_apart(node, conversation) or _is_bracketed(node, conversation, quoted)
    } | _whole_beside_streams(forest, {node.id for node in single} - quoted)
    systems = {node.call.shape.system for node in single if node.id in asides} - conversation.systems.get("", set())
    alike = {node.id for node in single if node.call.shape.system in systems and node.id not in quoted}
    return frozenset(asides | alike)


def _is_apart(node: PrefixNode, conversation: Thread) -> bool:
    """Whether a request is made in another way than each of the conversation's calls. Harnesses often send side calls
    (a commit message, a name) in another way."""
    manner = node.call.shape.manner
    if not manner or len(conversation.calls) < 2:
        return False
    return all(other.call.shape.manner not in ("", manner) for other in conversation.calls)


def _is_bracketed(node: PrefixNode, conversation: Thread, quoted: Container[str]) -> bool:
    """Whether the conversation began before a request under another system text and went on without its reply."""
    if not conversation.first.id < node.id < conversation.calls[-1].id or not node.call.shape.ends:
        return False
    return node.id not in quoted and node.call.shape.system not in conversation.systems.get("", ())


def _whole_beside_streams(forest: TokenForest, unused: Container[str]) -> set[str]:
    """The unused requests whose reply was not streamed, if the replies of all other calls were.

    A harness streams what it shows. If a reply that was not streamed is used, the harness is a workflow.
    """
    whole = [node for node in forest if not node.call.shape.manner.endswith(", streamed")]
    systems = {node.call.shape.system for node in forest if node.call.shape.manner.endswith(", streamed")}
    if not systems or any(node.id not in unused or node.call.shape.system in systems for node in whole):
        return set()
    return {node.id for node in whole}
