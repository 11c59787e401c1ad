"""Grammars: which ids a constrained request may sample next, by llguidance.

A grammar is compiled off the event loop, within limits of size and effort, and kept for the next request with the same.
`GrammarState` walks through one output in the loop's thread. Thinking is free: the grammar begins behind it. It may
have a budget of tokens, also without a grammar: then only its end is left.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from rolltap.errors import InvalidRequest
from rolltap.token_masks import Int32, MaskWriter

LONGEST = 256 * 1024
"""Characters of a grammar, or of a JSON schema as JSON."""

KEPT = 64
"""Compiled grammars that are kept."""

LIMITS = LLParserLimits(max_grammar_size=100_000, max_lexer_states=50_000, verbose_errors=False)
"""Effort: a grammar that needs more is refused, and a step that needs more ends its request."""

WHITESPACE = r"(?: |\r?\n[ \t]{0,40})?"
"""Between the tokens of JSON: a blank, or a line break and indentation. Weak models fill replies with more."""


@dataclass(frozen=True, slots=True)
class FreeThinking:
    """The ids around thinking. With `opened` the prompt ends in it; else the output may begin with `open`.

    `budget`: the most tokens between them; None: no limit.
    """

    close: int
    open: int | None = None
    opened: bool = False
    budget: int | None = None


class GrammarFailed(Exception):
    """A grammar needs more effort than a step may take."""


class GrammarState:
    """One output on its way through a grammar (None: the output is free, but for the thinking's budget).

    `ends` are the ids that end the output, allowed where it is complete.
    """

    def __init__(
        self, matcher: LLMatcher | None, words: int, ends: frozenset[int], thinking: FreeThinking | None
    ) -> None:
        self.writer = MaskWriter()
        self._matcher = matcher
        self._words = words
        self._ends = _bits(ends, words)
        self._end_ids = ends
        self._thinking = thinking
        self._inside = thinking is not None and thinking.opened
        self._begun = False
        self._thought = 0  # tokens of thinking

    def words(self) -> Int32 | None:
        """The allowed ids as a bitmap [words]; None: all. Raises `GrammarFailed`."""
        thinking, matcher = self._thinking, self._matcher
        if self._inside:
            assert thinking is not None
            spent = thinking.budget is not None and self._thought >= thinking.budget
            return _bits(frozenset({thinking.close}), self._words) if spent else None
        if matcher is None:
            return None
        stopped = matcher.is_stopped() and not matcher.is_error()
        allowed = self._ends.copy() if stopped else self._from_matcher(matcher)
        if not self._begun and thinking is not None and thinking.open is not None:
            allowed |= _bits(frozenset({thinking.open}), self._words)
        if not allowed.any():
            raise GrammarFailed("no token can go on")
        return allowed

    def _from_matcher(self, matcher: LLMatcher) -> Int32:
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            raise GrammarFailed(matcher.get_error()[:1000])
        allowed = np.frombuffer(mask, "<i4")[: self._words] & ~self._ends
        if matcher.is_accepting():
            allowed |= self._ends
        return allowed

    def take(self, token: int) -> None:
        """Goes on by a sampled id."""
        thinking, begun, self._begun = self._thinking, self._begun, True
        if self._inside:
            self._inside = thinking is None or token != thinking.close
            self._thought += 1
        elif not begun and thinking is not None and token == thinking.open:
            self._inside = True
        elif self._matcher is not None and token not in self._end_ids:
            self._matcher.consume_token(token)

    def go_on(self, tokens: Sequence[int]) -> None:
        """Takes ids that were sampled before. Raises `InvalidRequest` if the grammar does not let them through."""
        for token in tokens:
            self.take(token)
        try:
            self.words()
        except GrammarFailed as error:
            raise InvalidRequest(f"the output's beginning is not of the grammar: {error}", param="begun") from error


class Grammars:
    """Compiles grammars for a `tokenizer.json` and a model with `vocabulary` ids. Threads may share it."""

    def __init__(self, tokenizer: Path, vocabulary: int) -> None:
        self._path = tokenizer
        self._vocabulary = vocabulary
        self._tokenizer: LLTokenizer | None = None
        self._kept: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, lark: str) -> LLMatcher:
        """Takes up to a second the first time. Raises `InvalidRequest`, which says what is wrong with the grammar."""
        if len(lark) > LONGEST:
            raise _refused(f"it has {len(lark)} characters; the limit is {LONGEST}")
        with self._lock:
            matcher = self._kept.get(lark)
            if matcher is None:
                self._tokenizer = self._tokenizer or _read(self._path, self._vocabulary)
                matcher = LLMatcher(self._tokenizer, LLMatcher.grammar_from_lark(lark), log_level=0, limits=LIMITS)
                if matcher.is_error():
                    raise _refused(matcher.get_error())
                try:
                    self.start(matcher, frozenset(), None).words()
                except GrammarFailed as error:
                    raise _refused(str(error)) from error
                self._kept[lark] = matcher
            self._kept.move_to_end(lark)
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
            return matcher

    def start(self, matcher: LLMatcher | None, ends: frozenset[int], thinking: FreeThinking | None) -> GrammarState:
        """A new output under a compiled grammar; None: under none."""
        own = None if matcher is None else matcher.deep_copy()
        return GrammarState(own, -(-self._vocabulary // 32), ends, thinking)


def json_grammar(schema: Mapping[str, Any], *, after_thinking: bool) -> str:
    """The grammar of a JSON schema; line breaks may stand between thinking and JSON."""
    guided = {"x-guidance": {"whitespace_pattern": WHITESPACE}, **schema}
    return lark_grammar(f"%json {json.dumps(guided)}", after_thinking=after_thinking)


def regex_grammar(pattern: str, *, after_thinking: bool) -> str:
    return lark_grammar(f"/{pattern.replace('/', chr(92) + '/')}/", after_thinking=after_thinking)


def lark_grammar(body: str, *, after_thinking: bool) -> str:
    return f"start: {'BREAK ' if after_thinking else ''}body\nBREAK: /[ \\n]{{0,4}}/\nbody: {body}\n"


def _read(path: Path, vocabulary: int) -> LLTokenizer:
    """All added tokens are special there: none of them is text, as the proxy reads replies by ids."""
    described = json.loads(path.read_text(encoding="utf-8"))
    for token in described.get("added_tokens", ()):
        token["special"] = True
    return LLTokenizer(json.dumps(described), n_vocab=vocabulary)


def _bits(ids: frozenset[int], words: int) -> Int32:
    bits = np.zeros(words, np.uint32)
    for id in ids:
        bits[id // 32] |= np.uint32(1 << id % 32)
    return bits.view(np.int32)


def _refused(why: str) -> InvalidRequest:
    """The error with the compiler's words, without its place in the grammar that we made around the client's."""
    told = re.split(r"\n +1 \| |\n<non-verbose/>", why)[0]
    told = re.sub(r"^at \d+\(\d+\): (?:failed to compile JSON schema: )?", "", told).strip()
    return InvalidRequest(told[:1000], param="structured_outputs")
