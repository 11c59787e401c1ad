"""Random sessions for the property tests: what harnesses do to a conversation, as token arrays.

A session is made by playing moves. Each move makes one call: it continues a conversation token for token, starts a
subagent, retries the last prompt, edits the history, compacts it, asks a side call, or fails in one of the ways that
calls fail. What the generator intends is not given to the reconstructor: hints may be missing or wrong.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from hypothesis import strategies as st

from rolltap.types import Break, BreakReason, Call, CallKind, Finish, Flaw, Outcome, VersionSpan

VOCABULARY = 5
"""Small, so that prompts coincide by accident too."""


def ids(values: list[int]) -> np.ndarray:
    return np.asarray(values, np.int32)


def make_call(number: int, prompt: list[int], output: list[int], **changes: object) -> Call:
    """A completed call with aligned arrays; log-probabilities name the call and the token."""
    call = Call(
        id=f"{number:06d}",
        session_id="s",
        prompt_ids=ids(prompt),
        output_ids=ids(output),
        logprobs=np.asarray([-(number + 1) - i / 64 for i in range(len(output))], np.float32),
        versions=(VersionSpan(number % 3, 0, len(output)),) if output else (),
        policy="p",
        delivered=True,
    )
    return replace(call, **changes)  # type: ignore[arg-type]


@dataclass
class Player:
    """Plays a session; `contexts` are the conversations that a next call may go on from: (call id, tokens, agent)."""

    draw: st.DrawFn
    calls: list[Call] = field(default_factory=list)
    contexts: list[tuple[str | None, list[int], str]] = field(default_factory=list)

    def tokens(self, low: int, high: int) -> list[int]:
        return self.draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=low, max_size=high))

    def play(self, move: str) -> None:
        parent, context, agent = self.draw(st.sampled_from(self.contexts)) if self.contexts else (None, [], "")
        prompt, kind = context + self.tokens(1, 4), CallKind.MAIN
        reason: BreakReason | None = None
        if move == "fresh" or not self.contexts:
            parent, prompt = None, self.tokens(1, 4)
            agent = self.draw(st.sampled_from(["", "sub-1", "sub-2"]))
        elif move == "retry":
            again = self.draw(st.sampled_from(self.calls))
            parent, prompt, agent = again.parent_id, again.prompt_ids.tolist(), again.agent
        elif move == "edit":
            cut = self.draw(st.integers(0, len(context)))
            prompt = context[:cut] + self.tokens(1, 4)
            reason = BreakReason.HISTORY_EDITED
        elif move == "compact":
            prompt, reason = self.tokens(2, 5), BreakReason.COMPACTION
        elif move == "side":
            kind = self.draw(st.sampled_from([kind for kind in CallKind if kind is not CallKind.MAIN]))
        self._record(parent, prompt, agent, kind, reason)

    def _record(
        self, parent: str | None, prompt: list[int], agent: str, kind: CallKind, reason: BreakReason | None
    ) -> None:
        draw, number = self.draw, len(self.calls)
        hint = draw(st.sampled_from([parent, parent, None, "999999", *(call.id for call in self.calls[-2:])]))
        call = make_call(number, prompt, self.tokens(1, 4), kind=kind, agent=agent, parent_id=hint)
        if reason is not None and draw(st.booleans()):
            call = replace(call, break_=Break(reason, call.id, hint, draw(st.integers(0, 9))))
        call = self._fail(call, draw(st.sampled_from(["", "", "", "", *FAILURES])))
        self.calls.append(call)
        if len(call.output_ids):
            self.contexts.append((call.id, prompt + call.output_ids.tolist(), agent))

    def _fail(self, call: Call, how: str) -> Call:
        change = FAILURES[how] if how else {}
        if how == "nothing sampled":
            return make_call(
                int(call.id), call.prompt_ids.tolist(), [], outcome=Outcome.ENGINE_ERROR, parent_id=call.parent_id
            )
        if how in ("no log-probs", "text"):
            change = {**change, "logprobs": np.empty(0, np.float32)}
        if how == "text":
            change = {**change, "output_ids": ids([]), "versions": ()}
        return replace(call, **change)


FAILURES: dict[str, dict] = {
    "aborted": {"outcome": Outcome.ABORTED, "finish": Finish.ABORT},
    "engine error": {"outcome": Outcome.ENGINE_ERROR, "finish": Finish.ERROR},
    "nothing sampled": {},
    "undelivered": {"delivered": False},
    "delivery unknown": {"delivered": None},
    "no log-probs": {"flaw": Flaw.LOGPROBS_MISSING},
    "text": {"flaw": Flaw.TOKENS_MISSING},
    "unparsable": {"flaw": Flaw.TOOL_CALL_UNPARSABLE},
    "cut off": {"finish": Finish.LENGTH},
    "no version": {"versions": (), "flaw": Flaw.VERSION_UNKNOWN},
}
MOVES = ("continue", "continue", "continue", "fresh", "retry", "edit", "compact", "side")


@st.composite
def sessions(draw: st.DrawFn, max_calls: int = 12) -> list[Call]:
    """The calls of a session in the order of their ids."""
    player = Player(draw)
    for move in draw(st.lists(st.sampled_from(MOVES), min_size=1, max_size=max_calls)):
        player.play(move)
    return skewed(player.calls, draw(st.lists(st.booleans(), min_size=len(player.calls), max_size=len(player.calls))))


def skewed(calls: list[Call], elsewhere: list[bool]) -> list[Call]:
    """The calls as two proxies would name them, of which the second one's clock is three calls late."""
    ids = {call.id: f"{int(call.id) - 3 * late:+07d}{late:d}" for call, late in zip(calls, elsewhere, strict=True)}
    ids = {old: new.replace("-", "!").replace("+", "0") for old, new in ids.items()}

    def renamed(call: Call) -> Call:
        parent = ids.get(call.parent_id or "", call.parent_id)
        break_ = call.break_ and replace(call.break_, call_id=ids[call.id], parent_id=parent)
        return replace(call, id=ids[call.id], parent_id=parent, break_=break_)

    return sorted((renamed(call) for call in calls), key=lambda call: call.id)
