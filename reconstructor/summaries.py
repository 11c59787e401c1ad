"""Recognises summaries: calls whose reply replaced a history, and the attempts at them that a harness discarded.

A pipeline's next stage quotes the last stage's answer as a compacted history quotes its summary. A compaction differs
in two ways: the agent keeps its tools and its system text, and the summary was asked for in a message of its own,
whereas an answer follows the result of a tool.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping

import numpy as np

from rolltap.reconstructor.forest import PrefixNode, TokenForest, common_prefix
from rolltap.reconstructor.siblings import stands_in
from rolltap.reconstructor.threads import Thread, Threads
from rolltap.types import Finish

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
    shared = common_prefix(node.call.prompt_ids, earlier.call)
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
