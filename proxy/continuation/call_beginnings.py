"""The beginning of a tool call that a client demands. It ends the prompt, so the model can only go on with the call.

These ids are part of the prompt and never carry loss. All that follows is sampled by the model from its own
distribution, so the call can be trained; a grammar in the engine would change that distribution. It works with every
engine, and in every family whose calls the template writes and rolltap reads.
"""

from __future__ import annotations

from itertools import takewhile

from cachetools import LRUCache

from rolltap.errors import InvalidRequest
from rolltap.protocols.conversation import Message, Text, Tool, ToolCall
from rolltap.proxy.continuation.fit import ID_FORMS, Fitting
from rolltap.proxy.continuation.rendering import TokenRenderer

KNOWN_BEGINNINGS = 256
ARGUMENTS = ("{}", '{"name": "x"}', '{"other": [1]}')
"""What the ids before the arguments are found by: they are the same for all of these."""


class CallBeginnings:
    """The ids before the arguments of a call, in one family."""

    def __init__(self, renderer: TokenRenderer, fitting: Fitting) -> None:
        self._renderer = renderer
        self._fitting = fitting
        self._known: LRUCache[tuple[str, int], tuple[int, ...]] = LRUCache(KNOWN_BEGINNINGS)

    def find(self, name: str, number: int = 0) -> tuple[int, ...]:
        """The ids that begin a call of tool `name`, the conversation's call `number`. Empty if the family has none: its
        template writes no calls, or a reply to its prompts always begins with thinking.
        """
        has_ids = bool(self._fitting.id_form)
        key = name, number if has_ids else 0
        if key not in self._known:
            self._known[key] = () if self._renderer.opens_thinking else self._found(*key)
        return self._known[key]

    def _found(self, name: str, number: int) -> tuple[int, ...]:
        blocks = [self._block(name, number, arguments) for arguments in ARGUMENTS]
        beginning = _common(blocks)
        if self._renderer.tokenizer.decode(list(beginning)).endswith(name):  # another name might begin so
            beginning = _common(blocks[1:])
        return beginning

    def _block(self, name: str, number: int, arguments: str) -> tuple[int, ...]:
        """The ids of such a call, with what the family writes before it; empty if it is not read as that call."""
        tools = (Tool(name, "", {"type": "object", "properties": {}}),)
        id_form = ID_FORMS.get(self._fitting.id_form)
        call = ToolCall(f"{name} {number}", name, arguments)
        call = ToolCall(id_form(call, number), name, arguments) if id_form is not None else call
        question = Message("user", (Text("q"),))
        try:
            prompt, whole = (
                self._renderer.render(self._fitting.whole(messages).messages, tools, thinking=False)
                for messages in ([question], [question, Message("assistant", (), (call,))])
            )
        except InvalidRequest:
            return ()
        start = len(_common([tuple(prompt), tuple(whole)]))
        turn = list(takewhile(lambda token: token not in self._renderer.stop_token_ids, whole[start:]))
        pieces = self._renderer.parse(turn, prompt[:start], tools).pieces
        block = next((piece for piece in pieces if piece.calls), None)
        if block is None or [(called.name, called.ok) for called in block.calls or ()] != [(name, True)]:
            return ()
        before = turn[: block.start] if start == len(prompt) else []  # else the turn begins otherwise than a reply
        said = self._renderer.parse(before, prompt, tools)
        is_empty = not said.text.strip() and not said.reasoning
        return (*(before if is_empty else []), *turn[block.start :])


def _common(rows: list[tuple[int, ...]]) -> tuple[int, ...]:
    """The ids that all `rows` begin with."""
    return tuple(ids[0] for ids in takewhile(lambda ids: len(set(ids)) == 1, zip(*rows, strict=False)))
