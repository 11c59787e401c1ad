"""A model's turn as token ids that spell it, but are not what the tokenizer would make of it."""

from __future__ import annotations

import random
from collections.abc import Callable

from rolltap.protocols.conversation import Message, Text
from rolltap.proxy.continuation.rendering import TokenRenderer


def writer(renderer: TokenRenderer, tools: tuple, seed: int) -> Callable[[Message], list[int]]:
    """A function from assistant turns to adversarial ids, the turn-closing token last."""
    rng = random.Random(seed)
    end = renderer.stop_token_ids[:1]
    question = [Message("user", (Text("q"),))]

    def write(turn: Message) -> list[int]:
        if renderer.tokenizer.convert_tokens_to_ids("<|channel|>") is not None and not turn.tool_calls:
            return [*(piece for token in _final(renderer, turn) for piece in _split(renderer, token, rng)), *end]
        prompt = renderer.render(question, tools, thinking=True)
        whole = renderer.render([*question, turn], tools, thinking=True)
        ids = whole[_common(prompt, whole) :]
        closing = next((i for i in range(len(ids)) if ids[i] in renderer.stop_token_ids), len(ids))
        body, close = ids[:closing], ids[closing : closing + 1] or [renderer.stop_token_ids[0]]
        return [*(piece for token in body for piece in _split(renderer, token, rng)), *close]

    return write


def _final(renderer: TokenRenderer, turn: Message) -> list[int]:
    """A final turn of gpt-oss as it is sampled, after a prompt that opened the analysis channel.

    Its history form, which a rendering shows, has no analysis and another closing token.
    """
    guard = renderer.tokenizer.guard
    final = "<|end|><|start|>assistant<|channel|>final<|message|>"
    return renderer.tokenizer.encode(guard(turn.reasoning) + final + guard(turn.text))


def _common(a: list[int], b: list[int]) -> int:
    length = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        length += 1
    return length


def _split(renderer: TokenRenderer, token: int, rng: random.Random) -> list[int]:
    """The token, or two that spell the same, where the vocabulary has such."""
    tokenizer = renderer.tokenizer
    text = tokenizer.token(token)
    if len(text) < 2 or "\ufffd" in text or tokenizer.guard(text) != text or rng.random() < 0.5:
        return [token]
    at = rng.randrange(1, len(text))
    pieces = tokenizer.encode(text[:at]) + tokenizer.encode(text[at:])
    return pieces if tokenizer.decode(pieces) == text else [token]
