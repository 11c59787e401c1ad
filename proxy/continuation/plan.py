"""From a request to the exact prompt tokens: find the parent, prove it, bridge, or render and say why.

`Continuation.plan` never guesses. `shared` is counted on the token arrays, not claimed, and a plan without a `Break`
begins with every token that its parent's engine saw and sampled.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import msgspec
import numpy as np

from rolltap.proxy.continuation.call_node import CallNode, Lineage
from rolltap.proxy.continuation.forest import Forest, Match, Outline
from rolltap.proxy.continuation.handles import Handles
from rolltap.proxy.continuation.rendering import HistoryThinking, TokenRenderer
from rolltap.proxy.conversation.chat import ChatRequest, Message, Reasoning, Text
from rolltap.types import Break, BreakReason, Int32

SUMMARY_MIN_CHARACTERS = 32
"""A reply at least this long that reappears in another role is quoted."""

SUMMARY_TAG = re.compile(r"<(?P<tag>summary|state_snapshot)>(?P<text>.*?)</(?P=tag)>", re.DOTALL)
"""Harnesses that ask for an analysis and a summary keep only what stands in this tag."""

QUOTABLE_CALLS = 4
"""How many of a session's last calls are searched for: a summary is used at once."""

PROMPT_TAIL = 256
"""Ids of a parent's prompt that a renderer is shown: enough for its generation prompt, which says what is open."""


@dataclass(frozen=True, slots=True, eq=False)
class PromptPlan:
    """What to send and what it rests on. `shared` counts the leading tokens that are the parent's context.

    The parent's intent is on record, as the call is recorded by what it adds to it. A break may name a call whose
    intent is not.
    """

    prompt_ids: Int32
    parent: CallNode | None
    shared: int
    break_: Break | None
    lineage: Lineage
    items_shared: int
    quotes: tuple[str, ...] = ()  # recent calls whose reply stands in the request as somebody else's words

    def node(self, call_id: str, items: tuple[bytes, ...] = ()) -> CallNode:
        """The planned call's place in the forest; `items` are its request's."""
        node = CallNode(call_id, self.parent, self.lineage, self.prompt_ids, self.shared, self.break_)
        node.items = items
        return node


Rendering = Generator[tuple[int, Callable[[], Any]], Any, PromptPlan]
"""A plan on its way: gives the work that renders or encodes, with its bytes of text, and is sent the result."""


class RequestPlace(NamedTuple):
    """Where a request belongs. `twin` is the call that asked the very same of the same parent, if any did."""

    outline: Outline
    match: Match
    twin: CallNode | None


class Lineages:
    """Finds where a policy's calls belong. By itself it serves upstreams that render prompts themselves."""

    def __init__(self, policy: str, handles: Handles) -> None:
        self.policy = policy
        self.handles = handles

    def observe(self, call_id: str, forest: Forest, request: ChatRequest) -> PromptPlan:
        """The place of a call whose prompt is not known yet; `seen` proves it, or says that it can't be."""
        place = self._place(forest, request)
        nothing = np.empty(0, np.int32)
        if place.twin is not None:
            return self.seen(self._again(place.twin, call_id, forest, request, place), nothing)
        return self._placed(call_id, forest, request, place, nothing, None)

    def seen(self, plan: PromptPlan, prompt: Int32) -> PromptPlan:
        """The plan of `observe`, now that the upstream has said which tokens it rendered."""
        shared = _common_prefix(prompt, plan.parent)
        break_ = plan.break_
        if break_ is not None:
            proven = plan.parent is not None and 0 < len(plan.parent.context_ids()) == shared
            break_ = None if proven else replace(break_, token_index=shared)
        return replace(plan, prompt_ids=prompt, shared=shared, break_=break_)

    def may_lack_parent(self, plan: PromptPlan, forest: Forest, request: ChatRequest) -> bool:
        """Whether the call that the request goes on from may be one that the forest lacks: another replica's."""
        if plan.break_ is not None:
            return True
        if plan.parent is None:
            return any(message.role == "assistant" for message in request.messages)
        return any(call_id not in forest.nodes for call_id in self.handles.last_named(request))

    def _place(self, forest: Forest, request: ChatRequest, effort: str = "") -> RequestPlace:
        """What of the request is on record."""
        outline = forest.outline(self.policy, request, effort)
        match = forest.find(outline, self.handles.last_named(request))
        twin = match.node if match.node and match.proven == len(outline.links) == match.node.length else None
        if twin is None or match.proven == match.covered:
            return RequestPlace(outline, match, None)
        continued, base = twin.parent if twin.lineage.base else None, twin.lineage.base
        is_same = continued is match.context and twin.lineage.thoughts == outline.lineage(base).thoughts
        return RequestPlace(outline, match, twin if is_same else None)

    def _again(
        self, twin: CallNode, call_id: str, forest: Forest, request: ChatRequest, place: RequestPlace
    ) -> PromptPlan:
        """The same request once more is a sibling: the same prompt, the same parent, a new sample."""
        lineage = place.outline.lineage(twin.lineage.base, thinking=twin.lineage.thinking)
        break_ = replace(twin.break_, call_id=call_id) if twin.break_ is not None else None
        items, quotes = _shared_items(request, twin.parent), _quoted_replies(forest, request, place)
        return PromptPlan(twin.prompt_ids, twin.parent, twin.shared, break_, lineage, items, quotes)

    def _placed(
        self,
        call_id: str,
        forest: Forest,
        request: ChatRequest,
        place: RequestPlace,
        prompt: Int32,
        reason: BreakReason | None,
    ) -> PromptPlan:
        """The plan for `prompt`; `reason` says why it is not the plain continuation of `match.context`, if known."""
        outline, match = place.outline, place.match
        nearest = match.context or match.node or match.elsewhere or self._echoed(forest, request)
        parent = nearest if nearest is not None and nearest.recorded else None
        shared = _common_prefix(prompt, parent)
        quotes = _quoted_replies(forest, request, place)
        if match.context is None:
            reason = BreakReason.COMPACTION if quotes else self._unmatched(forest, outline, match, nearest)
        elif reason is None and shared < match.context.context_length:
            # An upstream that renders by itself has not said its prompt yet: there is no template of ours to blame.
            reason = BreakReason.TEMPLATE_NOT_BRIDGEABLE if len(prompt) else BreakReason.TOKENS_DIFFER
        break_ = None
        if reason is not None:
            break_ = Break(reason, call_id, nearest.call_id if nearest else None, shared, outline.lead + match.proven)
        lineage = outline.lineage(match.covered if match.context is not None else 0)
        return PromptPlan(prompt, parent, shared, break_, lineage, _shared_items(request, parent), quotes)

    def _echoed(self, forest: Forest, request: ChatRequest) -> CallNode | None:
        """The call whose reply is the request's last, by its handle: of a history that was edited from the first on."""
        return next((node for call_id in self.handles.last_named(request) if (node := forest.nodes.get(call_id))), None)

    def _unmatched(
        self, forest: Forest, outline: Outline, match: Match, nearest: CallNode | None
    ) -> BreakReason | None:
        """Why no recorded reply leads to this request; None where nothing had to be continued."""
        if not forest.nodes:
            return None
        if match.node is not None:
            unfinished = match.proven == match.node.length and not match.node.continuable
            return BreakReason.PARENT_UNFINISHED if unfinished else BreakReason.HISTORY_EDITED
        if match.elsewhere is not None:
            same_tools = match.elsewhere.lineage.tools == outline.tools
            return BreakReason.SYSTEM_CHANGED if same_tools else BreakReason.TOOLS_CHANGED
        return BreakReason.NEW_CONVERSATION if nearest is None else BreakReason.HISTORY_EDITED


class Continuation(Lineages):
    """Plans prompts for the calls of one policy."""

    def __init__(self, policy: str, renderer: TokenRenderer, handles: Handles, history: HistoryThinking) -> None:
        super().__init__(policy, handles)
        self.renderer = renderer
        self._at_effort = {level: renderer.at_effort(level) for level in renderer.efforts.levels} | {"": renderer}
        self.history = history
        self._drops_thinking = drops_thinking(renderer)

    def plan(
        self, call_id: str, forest: Forest, request: ChatRequest, *, thinking: bool, effort: str = ""
    ) -> PromptPlan:
        """The prompt for `request`, whose call will be `call_id`; it says the level `effort`."""
        steps, result = self.steps(call_id, forest, request, thinking=thinking, effort=effort), None
        while True:
            try:
                _, work = steps.send(result)
            except StopIteration as end:
                return end.value
            result = work()

    def steps(
        self, call_id: str, forest: Forest, request: ChatRequest, *, thinking: bool, effort: str = ""
    ) -> Rendering:
        """`plan`, which leaves it to the caller where the work is done: any thread may do it."""
        place, renderer = self._place(forest, request, effort), self._at_effort[effort]
        outline, match, twin = place
        if twin is not None and twin.lineage.thinking == thinking and _is_unnamed(twin) == bool(match.rivals):
            return self._again(twin, call_id, forest, request, place)
        node, covered = match.context, outline.lead + match.covered
        ids, reason = None, self._against(match, request.messages[covered:])
        if node is not None and reason is None:
            edited = any(message.role == "assistant" for message in request.messages[covered:])
            size = weight(request, 0 if edited else len(node.items))
            ids, reason = yield size, partial(self._continue, renderer, node, request, covered, thinking=thinking)
        if ids is None:
            render = partial(renderer.render, request.messages, request.tools, thinking=thinking)
            ids = yield weight(request), render
        prompt = np.asarray(ids, np.int32)
        if twin is not None and match.context is None:
            plan = self.seen(self._again(twin, call_id, forest, request, place), prompt)
        else:
            plan = self._placed(call_id, forest, request, place, prompt, reason)
        return replace(plan, lineage=msgspec.structs.replace(plan.lineage, thinking=thinking))

    def _against(self, match: Match, new: Sequence[Message]) -> BreakReason | None:
        """Why `new` does not go on from the tokens of `match.context`, where that is known beforehand."""
        if match.rivals:
            return BreakReason.AMBIGUOUS_PARENT
        if match.context is not None and self._follows_template(match.context, new):
            return BreakReason.THINKING_DROPPED
        return None

    def _continue(
        self, renderer: TokenRenderer, node: CallNode, request: ChatRequest, covered: int, *, thinking: bool
    ) -> tuple[Int32 | None, BreakReason | None]:
        """The parent's tokens and the new messages' ids, or None and the reason.

        A renderer is given the end of the parent's prompt only, which is all that it may look at: long histories are
        not copied through lists.
        """
        new = request.messages[covered:]
        history = node.prompt_ids
        tail, output = history[-PROMPT_TAIL:].tolist(), node.output_ids.tolist()
        if new and not any(message.role == "assistant" for message in new):
            ids = renderer.bridge(tail, output, new, request.tools, thinking=thinking)
            reason = BreakReason.TEMPLATE_NOT_BRIDGEABLE if ids is None else None
        else:
            ids, reason = None, BreakReason.HISTORY_EDITED
            if new:
                ids = renderer.splice(tail, output, request.messages, covered, request.tools, thinking=thinking)
        if ids is None:
            return None, reason
        return np.concatenate([history[: len(history) - len(tail)], np.asarray(ids, np.int32)]), reason

    def _follows_template(self, node: CallNode, new: Sequence[Message]) -> bool:
        """Whether the policy lets the template drop thinking here: at a new user turn, if there is any to drop."""
        if self.history == "keep" or not self._drops_thinking:
            return False
        return node.holds_thinking and any(message.role == "user" for message in new)


def _is_unnamed(node: CallNode) -> bool:
    """Whether the call was asked for without saying which of several calls it goes on from."""
    return node.break_ is not None and node.break_.reason is BreakReason.AMBIGUOUS_PARENT


def drops_thinking(renderer: TokenRenderer) -> bool:
    """Whether a family leaves out what was thought before a new user turn, when the history still has it."""
    thought = "314159265"
    history = (
        Message("user", (Text("Which?"),)),
        Message("assistant", (Reasoning(thought), Text("This."))),
        Message("user", (Text("Sure?"),)),
    )
    return thought not in renderer.tokenizer.decode(renderer.render(history, (), thinking=True))


def weight(request: ChatRequest, first: int = 0) -> int:
    """Bytes of the request's text from its `first` history item on, or nearly."""
    beside = sum(map(len, request.fixed.values())) if first == 0 else 0
    return sum(map(len, request.items[first:])) + beside


def _quoted_replies(forest: Forest, request: ChatRequest, place: RequestPlace) -> tuple[str, ...]:
    """Which of the last replies stand in a request that continues none, as a compaction's summary does.

    They stand there as somebody else's words; or as the agent's own although they were sampled with other tools or
    another system text, and no call with those began as this request does.
    """
    match, frame = place.match, place.outline.frame
    if match.context is not None:
        return ()
    others = [message.text for message in request.messages if message.role != "assistant"]
    own = [message.text for message in request.messages if message.role == "assistant"]
    same_beginning = match.elsewhere is not None and match.elsewhere.frame != frame
    quoted = []
    for node in list(forest.nodes.values())[-QUOTABLE_CALLS:]:
        text = node.reply.text if node.reply is not None else ""
        inner = SUMMARY_TAG.search(text)
        passages = [text.strip(), *([inner["text"].strip()] if inner is not None else [])]
        texts = others if same_beginning or node.frame == frame else [*others, *own]
        if any(len(passage) >= SUMMARY_MIN_CHARACTERS and passage in each for passage in passages for each in texts):
            quoted.append(node.call_id)
    return tuple(quoted)


def _common_prefix(prompt: Int32, parent: CallNode | None) -> int:
    """How many leading ids of `prompt` equal the parent's prompt followed by its output."""
    if parent is None:
        return 0
    context = parent.context_ids()
    length = min(len(prompt), len(context))
    differs = np.flatnonzero(prompt[:length] != context[:length])
    return int(differs[0]) if len(differs) else length


def _shared_items(request: ChatRequest, parent: CallNode | None) -> int:
    """How many leading history items repeat the parent request's byte for byte."""
    theirs = parent.items if parent else ()
    if request.items[: len(theirs)] == theirs:
        return len(theirs)
    return next(at for at, (mine, own) in enumerate(zip_longest(request.items, theirs)) if mine != own)
