"""A call's tokens as the engine saw them, each with its text, and the place where a call leaves its parent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rolltap.calllog.annotations import AnnotationStreams
from rolltap.calllog.facts import CallRow
from rolltap.reading.types import BreakView, CallTokens, TokenView, TopToken
from rolltap.types import NO_VERSION, Bool, Break, Float32, Int32, common_length

SPREAD = 8
"""Tokens before a window that are decoded with it, so that its first character is complete."""


@dataclass(frozen=True, slots=True, eq=False)
class Context:
    """A call's prompt followed by its output. All arrays are [P + T]; `logprobs` is NaN where none is known."""

    row: CallRow
    ids: Int32
    logprobs: Float32
    versions: Int32
    trained: Bool
    trainer: AnnotationStreams | None = None

    @classmethod
    def of(cls, row: CallRow, *, trained: bool) -> Context:
        completion = row.completion
        prompt, output = row.prompt_ids, completion.output_ids if completion is not None else np.empty(0, np.int32)
        ids = np.concatenate([prompt, output])
        logprobs = np.full(len(ids), np.nan, np.float32)
        versions = np.full(len(ids), NO_VERSION, np.int32)
        if completion is not None:
            if len(completion.logprobs) == len(output):
                logprobs[len(prompt) :] = completion.logprobs
            for span in completion.versions:
                versions[len(prompt) + span.start : len(prompt) + span.end] = span.version
        sampled = row.call().unmasked if trained else np.zeros(len(output), np.bool_)
        return cls(row, ids, logprobs, versions, np.concatenate([np.zeros(len(prompt), np.bool_), sampled]))

    @property
    def prompt_tokens(self) -> int:
        return len(self.row.prompt_ids)


def views(context: Context, start: int, end: int, vocabulary: Vocabulary | None) -> tuple[TokenView, ...]:
    """Returns tokens `[start, end)` of the context."""
    texts = [""] * (end - start)
    if vocabulary is not None:
        first = max(0, start - SPREAD)
        texts = vocabulary.pieces(context.ids[first:end])[start - first :]
    prompt = context.prompt_tokens
    return tuple(
        TokenView(
            index=index,
            id=int(context.ids[index]),
            text=texts[index - start],
            sampled=index >= prompt,
            shared=index < context.row.intent.shared,
            trained=bool(context.trained[index]),
            logprob=_number(context.logprobs[index]),
            version=int(context.versions[index]) if context.versions[index] != NO_VERSION else None,
            top=_top(context, index - prompt, vocabulary) if index >= prompt else (),
            **_trainer_values(context.trainer, index - prompt),
        )
        for index in range(start, end)
    )


def window(context: Context, start: int, end: int | None, vocabulary: Vocabulary | None) -> CallTokens:
    """Returns the requested tokens, as far as they exist."""
    total = len(context.ids)
    first = min(max(start, 0), total)
    last = total if end is None else min(max(end, first), total)
    return CallTokens(
        call_id=context.row.intent.id,
        policy=context.row.intent.policy,
        prompt_tokens=context.prompt_tokens,
        total=total,
        start=first,
        tokens=views(context, first, last, vocabulary),
        vocabulary=vocabulary is not None,
    )


def both_sides(
    break_: Break, call: Context, earlier: Sequence[Context], around: int, vocabulary: Vocabulary | None
) -> BreakView:
    """Returns both sides of a break: `around` tokens before the first difference, and of each side after it.

    The prompt is compared with the context of `earlier` that it follows longest; of equals, the last one.
    """
    differs_at, closest = break_.token_index, None
    for context in earlier:
        shared = common_length(call.ids[: call.prompt_tokens], context.ids)
        if shared >= differs_at:
            differs_at, closest = shared, context
    expected: Sequence[TokenView] = ()
    if closest is not None:
        length = len(closest.ids)
        expected = views(closest, min(differs_at, length), min(differs_at + around, length), vocabulary)
    start, end = min(differs_at, len(call.ids)), min(differs_at + around, len(call.ids))
    return BreakView(
        call_id=break_.call_id,
        parent_id=break_.parent_id,
        reason=break_.reason.value,
        token_index=break_.token_index,
        message_index=break_.message_index,
        against=closest.row.intent.id if closest is not None else None,
        differs_at=differs_at,
        before=views(call, max(0, start - around), start, vocabulary),
        expected=tuple(expected),
        found=views(call, start, end, vocabulary),
    )


def _top(context: Context, position: int, vocabulary: Vocabulary | None) -> tuple[TopToken, ...]:
    """Returns the candidates at a sampled position, the likeliest first; empty if the engine gave none."""
    completion = context.row.completion
    if completion is None or "top_ids" not in completion.extras or "top_logprobs" not in completion.extras:
        return ()
    ids, logprobs = completion.extras["top_ids"][position], completion.extras["top_logprobs"][position]
    texts = [vocabulary.piece(int(id)) or "" for id in ids] if vocabulary is not None else [""] * len(ids)
    return tuple(TopToken(int(id), text, float(lp)) for id, text, lp in zip(ids, texts, logprobs, strict=True))


def _trainer_values(streams: AnnotationStreams | None, position: int) -> dict[str, Any]:
    """Returns the trainer's values for a sampled position; empty for tokens of the prompt."""
    if streams is None or position < 0:
        return {}
    clipped = int(streams.clipped[position]) if position < len(streams.clipped) else -1
    return {
        "trainer_logprob": _number(streams.logprobs[position]) if position < len(streams.logprobs) else None,
        "trainer_entropy": _number(streams.entropy[position]) if position < len(streams.entropy) else None,
        "clipped": None if clipped < 0 else bool(clipped),
    }


def _number(value: np.float32) -> float | None:
    """Returns None for NaN and infinity, which JSON does not have."""
    return float(value) if np.isfinite(value) else None


UNFINISHED = "\ufffd"
LONGEST_SPREAD = 4
"""A character of UTF-8 is spread over at most this many tokens."""

KEPT_PIECES = 1 << 18


class Vocabulary:
    """The text of a tokenizer's ids. `decode` maps ids to their text, special tokens included.

    A piece is what its token adds to the text before it, so the pieces of a sequence join to its text. If a character
    is spread over several tokens, the last of them has it and the others are empty.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._anchor = self._find_anchor()
        self._pieces: dict[int, str | None] = {}

    def pieces(self, ids: Int32 | Sequence[int]) -> list[str]:
        texts: list[str] = []
        pending: list[int] = []
        for id in np.asarray(ids).tolist():
            piece = self.piece(id) if not pending else None
            if piece is not None:
                texts.append(piece)
                continue
            pending.append(id)
            text = self._text(pending)
            if text.endswith(UNFINISHED) and len(pending) < LONGEST_SPREAD:
                texts.append("")
            else:
                texts.append(text)
                pending = []
        if pending and texts:
            texts[-1] = self._text(pending)
        return texts

    def piece(self, id: int) -> str | None:
        """Returns the text of one token by itself; None if it is only a part of a character."""
        if id not in self._pieces:
            if len(self._pieces) >= KEPT_PIECES:
                self._pieces.clear()
            text = self._text([id])
            self._pieces[id] = None if UNFINISHED in text else text
        return self._pieces[id]

    def _text(self, ids: Sequence[int]) -> str:
        """Returns what the ids add after an ordinary token: some tokenizers drop a text's first space."""
        anchor, length = self._anchor
        return self._decode([*anchor, *ids])[length:]

    def _find_anchor(self) -> tuple[list[int], int]:
        """Returns a token with a plain text, and that text's length."""
        for id in range(200):
            text = self._decode([id])
            if len(text) == 1 and text.isascii() and text.isalnum():
                return [id], 1
        return [], 0
