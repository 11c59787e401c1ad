"""Recognises side calls: requests beside the agent's work, whose replies the agent's conversation goes on without.

A branch is a call that continues another one, with all calls that continue it. Where several branches continue one
call, the conversation's own branch is the one that was continued further; the others are its forks.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass

from rolltap.reconstructor.forest import PrefixNode, TokenForest, common_prefix
from rolltap.reconstructor.siblings import quoted_share
from rolltap.reconstructor.threads import Thread, Threads
from rolltap.types import Finish, Outcome

ABOUT = 0.8
"""A request is about the same task as another one if it contains this share of the other one's own text."""


@dataclass(frozen=True, slots=True, eq=False)
class Forks:
    """The calls of branches that the conversation goes on without.

    `side`: those of side agents and single side calls. `used`: by call id, the number of a branch whose last reply the
    conversation quotes as a tool's result: a subagent that was given the history.
    """

    side: frozenset[str]
    used: Mapping[str, int]


def forks_of(forest: TokenForest, threads: Threads, summaries: Mapping[str, PrefixNode]) -> Forks:
    """Finds the forks of a session. They are judged only if it is on record what their requests end with."""
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
        for fork, own in _forks_at(node, threads, summaries, extents):
            goes_on = own is not None and extents[own.id].alike > fork.id
            if own is not None and fork.id < own.id:  # a summary may have replaced it
                goes_on &= own.id not in compacted and threads.depths[own.id] > threads.depths[node.id]
            extent = extents[fork.id]
            if node.call.finish is Finish.TOOL_CALLS and extent.latest in quoting:
                used.update((each.id, branches) for each in _branch(fork, threads))
                branches += 1
            elif fork.call.shape.toolset != node.call.shape.toolset:
                if goes_on or _ends_apart(fork, node):
                    branch = {each.id: each.call.shape.toolset for each in _branch(fork, threads)}
                    if node.call.shape.toolset not in branch.values():
                        side |= branch.keys()
            elif goes_on and extent.calls == 1 and fork.id not in repeated and _is_completed(fork):
                side.add(fork.id)
    return Forks(frozenset(side), used)


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


def _forks_at(
    node: PrefixNode, threads: Threads, summaries: Container[str], extents: Mapping[str, _Extent]
) -> Iterator[tuple[PrefixNode, PrefixNode | None]]:
    """The forks among the branches that continue `node`, and the conversation's own branch.

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
    for fork in branches:
        if fork is not own:
            yield fork, own


def _is_own(
    branch: PrefixNode, node: PrefixNode, threads: Threads, extents: Mapping[str, _Extent]
) -> tuple[bool, bool, str]:
    """Sort key of the branches that continue `node`: the conversation's own one answers the tools that `node` called,
    was continued itself, or came last."""
    return _answers(branch, node), branch.id in threads.followers, extents[branch.id].alike


def _answers(branch: PrefixNode, node: PrefixNode) -> bool:
    """Whether a branch begins with the results of tools that `node` called."""
    return node.call.finish is Finish.TOOL_CALLS and branch.call.shape.ends == "tool"


def _branch(fork: PrefixNode, threads: Threads) -> Iterator[PrefixNode]:
    """A fork's calls."""
    waiting = [fork]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += threads.followers.get(node.id, ())


def _ends_apart(fork: PrefixNode, node: PrefixNode) -> bool:
    """Whether a session's last branch is a side agent's: `node` had answered, and fewer tools and another system text
    are not how the same agent goes on."""
    mine, theirs = fork.call.shape, node.call.shape
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
    own = first.call.prompt_ids[common_prefix(node.call.prompt_ids, first.call) :]
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
