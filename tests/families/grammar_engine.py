"""A scripted engine that keeps to grammars: such replies are drawn from what these leave, with the ids on record."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np

from rolltap.engine.grammar import FreeThinking, Grammars, GrammarState, json_grammar
from rolltap.engine.scripted import ScriptedEngine, logprob_of
from rolltap.proxy.engines.base import SampleChunk, SampleRequest, Take
from rolltap.proxy.engines.vllm import VllmEngine
from rolltap.token_masks import FREE, ids_of_words
from rolltap.types import VersionSpan

LONG, LONGEST = 500, 3000
THOUGHT = "I look."


class GrammarEngine(VllmEngine):
    """The client of a scripted engine in this process. What its script says to a request with a grammar is not asked:
    ids that close something are preferred, and the more the longer the reply is."""

    def __init__(self, scripted: ScriptedEngine, name: str, settings: Any, **more: Any) -> None:
        super().__init__(name, settings, **more)
        self._grammars = True
        self._journal, self._tokenizer = scripted.journal, scripted.model.writer.tokenizer
        self._compiler = Grammars(Path(self._tokenizer.name_or_path, "tokenizer.json"), self._size())
        self._closing = frozenset(id for text, id in self._tokenizer.vocabulary.items() if text[0] in '"}]')

    async def sample(self, request: SampleRequest, take: Take) -> None:
        lark, form = request.extra.get("grammar"), request.extra.get("json_schema")
        if lark is None and form is None:
            await super().sample(request, take)
            return
        thinking = request.extra.get("thinking")
        matcher = self._compiler.compile(lark or json_grammar(form or {}, after_thinking=thinking is not None))
        ends, rng = frozenset(request.stop_token_ids), random.Random(self._journal.count)
        state = self._compiler.start(matcher, ends, FreeThinking(**thinking) if thinking else None)
        state.go_on(request.prompt_ids[len(request.prompt_ids) - request.extra.get("begun", 0) :])
        entry = self._journal.begin(request.id, request.session_id, list(request.prompt_ids))
        goes_on = True
        while goes_on:
            at = len(entry.output)
            assert at < LONGEST
            rows: list[int] = []
            for _ in range(rng.randrange(1, 9)):
                rows.append(self._draw(entry.output, state, thinking, ends, rng))
                if entry.output[-1] in ends:
                    break
            chunk, over = entry.output[at:], entry.output[-1] in ends
            logprobs = [logprob_of(token, place) for place, token in enumerate(chunk, at)]
            versions = (VersionSpan(0, 0, len(entry.output)),) if over else None
            masks = {"mask_rows": np.asarray(rows, np.int32), "mask_table": state.writer.take()}
            finish = "stop" if over else None
            goes_on = take(SampleChunk(chunk, logprobs, finish, versions, extras=masks)) and not over
        self._journal.end(entry, "finished")

    def _draw(
        self, output: list[int], state: GrammarState, thinking: Any, ends: frozenset[int], rng: random.Random
    ) -> int:
        """Draws a token; its row of masks."""
        words = state.words()
        if words is None:
            closes = rng.random() < 0.3
            output.append(thinking["close"] if closes else rng.choice(self._tokenizer.encode(THOUGHT)))
        else:
            allowed = ids_of_words(words).tolist()
            preferred = [token for token in allowed if token in ends or token in self._closing]
            output.append(rng.choice(preferred if preferred and rng.random() < 0.4 + len(output) / LONG else allowed))
        state.take(output[-1])
        return FREE if words is None else state.writer.add(words)

    def _size(self) -> int:
        return 1 + max([*self._tokenizer.vocabulary.values(), *self._tokenizer.special])
