"""A recorded call as continuation sees it: its place among a session's calls, its prompt, its reply."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from rolltap.proxy.cache_space import message_bytes
from rolltap.proxy.continuation.canonical import DIGEST_BYTES, thought_digest
from rolltap.proxy.conversation.chat import Message
from rolltap.types import Break, BreakReason, Int32, Outcome

CALL_BYTES = 1200
"""Of every call beside its ids, digests and reply: the objects that hold them, and their places."""

LINK_BYTES = 380
"""Of every message that a call adds: its digest, and two places in the index."""

ITEM_BYTES = 80
"""Of every item of a request: its digest."""

Thought = tuple[int, bytes]
"""What an assistant's message thinks: its place in the conversation, and the digest of the thinking."""


class Lineage(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the log keeps so that a forest can be rebuilt without parsing requests again.

    A request is its frame (policy, tools, leading system text, effort) and its conversation (the other messages).
    `base` is how many of the conversation's messages are the parent's (its reply included), `links` the concatenated
    chain digests of the others. `thinking` is whether the call was to think: the prompt's end depends on it.
    `thoughts` are those of the other messages: what rolltap did not sample, or not so.
    """

    base: int
    links: bytes
    tools: bytes
    system: bytes
    thinking: bool = True
    thoughts: tuple[Thought, ...] = ()


class CallNode:
    """A recorded call as continuation sees it.

    Its prompt is kept whole until a call continues it, then as the ids that are not its parent's: a chain of n calls
    holds every token once.
    """

    __slots__ = (
        "_prompt", "break_", "call_id", "context_digest", "holds_thinking", "items", "lineage", "outcome", "output_ids",
        "parent", "prompt_length", "recorded", "reply", "shared", "thought", "weighed",
    )  # fmt: skip

    def __init__(
        self,
        call_id: str,
        parent: CallNode | None,
        lineage: Lineage,
        prompt_ids: Int32,
        shared: int = 0,
        break_: Break | None = None,
    ) -> None:
        self.call_id = call_id
        self.parent = parent
        self.lineage = lineage
        self.prompt_length = len(prompt_ids)
        self._prompt = prompt_ids  # all of it, or what follows `shared`
        self.shared = shared
        self.break_ = break_
        self.output_ids: Int32 = np.empty(0, np.int32)
        self.reply: Message | None = None
        self.outcome: Outcome | None = None  # None: in flight
        self.recorded = False  # its intent is durable: only then may the record of another call rest on it
        self.holds_thinking = False  # whether what was thought, here or before, stands in the prompt and reply
        self.thought = b""  # the digest of the reply's thinking
        self.context_digest = b""
        self.items: tuple[bytes, ...] = ()  # the request's raw items; dropped when a child takes over
        self.weighed = 0  # its part of its forest's size

    @property
    def length(self) -> int:
        """Messages of the request's conversation."""
        return self.lineage.base + len(self.lineage.links) // DIGEST_BYTES

    @property
    def frame(self) -> bytes:
        return self.lineage.tools + self.lineage.system

    @property
    def continuable(self) -> bool:
        return self.outcome is Outcome.COMPLETED and self.reply is not None

    @property
    def prompt_ids(self) -> Int32:
        """The prompt, [P]; put together from the calls before it where a child has taken over.

        A thread may read it while a child takes over: each call's own part is looked at once.
        """
        pieces: list[Int32] = []
        node, missing = self, self.prompt_length
        while len(own := node._prompt) < node.prompt_length:
            if missing > node.shared:
                pieces.append(own[: missing - node.shared])
                missing = node.shared
            assert node.parent is not None
            node = node.parent
            if missing > node.prompt_length:
                pieces.append(node.output_ids[: missing - node.prompt_length])
                missing = node.prompt_length
        if not pieces:
            return own
        return np.concatenate([own[:missing], *reversed(pieces)])

    @prompt_ids.setter
    def prompt_ids(self, ids: Int32) -> None:
        """What an upstream that renders by itself says it saw."""
        self._prompt, self.prompt_length = ids, len(ids)

    @property
    def context_length(self) -> int:
        """Ids of prompt and output together."""
        return self.prompt_length + len(self.output_ids)

    @property
    def held(self) -> int:
        """Token ids that this node holds in memory."""
        return len(self._prompt) + len(self.output_ids)

    @property
    def size(self) -> int:
        """About how many bytes this node takes in memory, with its places in the forest."""
        links = LINK_BYTES * (len(self.lineage.links) // DIGEST_BYTES) + ITEM_BYTES * len(self.items)
        reply = message_bytes(self.reply) if self.reply is not None else 0
        return CALL_BYTES + 4 * self.held + links + reply

    def complete(self, output_ids: Int32, reply: Message | None, outcome: Outcome) -> None:
        """Only a call whose intent is on record ends."""
        self.recorded = True
        self.output_ids, self.reply, self.outcome = output_ids, reply, outcome
        dropped = self.break_ is not None and self.break_.reason is BreakReason.THINKING_DROPPED
        inherited = self.parent is not None and self.parent.holds_thinking and not dropped
        self.holds_thinking = inherited or (reply is not None and bool(reply.reasoning))
        self.thought = thought_digest(reply) if reply is not None else b""

    def context_ids(self) -> Int32:
        """Prompt and output, [P + T]."""
        return np.concatenate([self.prompt_ids, self.output_ids])

    def request_digest(self) -> bytes:
        """The chain digest after the request's last message."""
        if self.lineage.links:
            return self.lineage.links[-DIGEST_BYTES:]
        return self.parent.context_digest if self.parent is not None else b""

    def has_thoughts(self, thoughts: Sequence[Thought]) -> bool:
        """Whether all of a conversation's `thoughts` are those of this call and the calls that it continues.

        The conversation's messages are known to be theirs. What a client dropped is not held against it.
        """
        node = self
        for place, thought in reversed(thoughts):
            while place < node.lineage.base:
                if node.parent is None:  # not on record
                    return True
                node = node.parent
            recorded = node.thought if place == node.length else dict(node.lineage.thoughts).get(place)
            if recorded != thought:
                return False
        return True

    def hand_over(self) -> None:
        """A child continues this call and holds what both have: this one keeps only what is its own."""
        self.items = ()
        if self.parent is not None and self.shared and len(self._prompt) == self.prompt_length:
            self._prompt = self._prompt[self.shared :].copy()


def same_context(a: CallNode, b: CallNode) -> bool:
    """Whether the prompts and outputs of two calls are the same tokens."""
    return a.context_length == b.context_length and np.array_equal(a.context_ids(), b.context_ids())
