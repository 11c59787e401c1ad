"""A session, read and reconstructed, with facts about its calls; and calls of any dialect, decoded to messages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import msgspec

from rolltap.calllog.facts import CallIntent, CallRow, RequestParts, extend_items
from rolltap.calllog.sessions import StoredSessions, decode_session
from rolltap.decoding import any_json, from_json
from rolltap.errors import RecordTooLarge, RequestError
from rolltap.protocols.base import Dialect, FindCall
from rolltap.protocols.cache_space import CacheSpace
from rolltap.protocols.conversation import ChatRequest, Image, Message, Reasoning, Text
from rolltap.protocols.dialects import open_dialects
from rolltap.protocols.handles import recorded_name
from rolltap.reading.tokens import Context
from rolltap.reading.types import OPEN, CallLine, CallTurn, MessageView, PartView
from rolltap.reconstructor.reconstruct import reconstruct
from rolltap.reconstructor.rules import Rules
from rolltap.types import Break, Classification, InjectedMessage, Outcome, Session, Trajectory

COMPARED = 64
"""Maximum earlier calls whose tokens are compared with a broken call's, to find the one that it follows longest."""


@dataclass(frozen=True, slots=True, eq=False)
class DecodedSession:
    """A session with its calls in order, without their requests, and its trajectory.

    A fork's trajectory has the calls of its origin as context; `rows` has its own. `others` has what the other policies
    train that learn from the session; `purposes` says of a call what its own policy's training makes of it.
    """

    session: Session
    rows: Mapping[str, CallRow]
    models: Mapping[str, str]
    trajectory: Trajectory
    purposes: Mapping[str, Classification]
    breaks: Mapping[str, Break]  # as recorded by the proxy, else as found by the reconstruction
    retries: Mapping[str, str]  # from a call to the earlier one with the same request
    others: Mapping[str, Trajectory]

    @classmethod
    def of(
        cls, stored: StoredSessions, rules: Callable[[Session], Rules], trained: Collection[str] = ()
    ) -> DecodedSession:
        """`trained`: the policies that learn from the session, where the ledger knows them."""
        session, context, models = decode_session(stored)
        calls = [row.call() for row in context]
        trajectory = reconstruct(calls, rules=rules(session))
        others = {
            policy: reconstruct(calls, rules=rules(replace(session, policy=policy)))
            for policy in trained
            if policy != session.policy
        }
        of_call = {call.id: others.get(call.policy, trajectory) for call in calls}
        rows = [row for row in context if not row.sampled_by]
        recorded = {row.intent.id: row.intent.break_ for row in rows if row.intent.break_ is not None}
        return cls(
            session=session,
            rows={row.intent.id: row for row in rows},
            models=models,
            trajectory=trajectory,
            purposes={
                purpose.call_id: purpose
                for each in (trajectory, *others.values())
                for purpose in each.classifications
                if of_call[purpose.call_id] is each
            },
            breaks={**{break_.call_id: break_ for break_ in trajectory.breaks}, **recorded},
            retries=_retries(rows),
            others=others,
        )

    def context(self, call_id: str) -> Context:
        """Returns the call's tokens."""
        return Context.of(self.rows[call_id], trained=self.purposes[call_id].mask == "")

    def before(self, call_id: str) -> list[str]:
        """Returns the calls to compare with a broken call: the parent that its break names, and those after it.

        These are at most the last `COMPARED` calls.
        """
        ids = list(self.rows)
        parent_id = self.breaks[call_id].parent_id
        first = ids.index(parent_id) if parent_id is not None and parent_id in self.rows else 0
        last = ids.index(call_id)
        return ids[max(first, last - COMPARED) : last]

    def reply(self, call_id: str) -> MessageView | None:
        completion = self.rows[call_id].completion
        return reply_view(completion.message) if completion is not None else None

    def line(self, call_id: str) -> CallLine:
        row, purpose = self.rows[call_id], self.purposes[call_id]
        intent, completion = row.intent, row.completion
        prompt_tokens, output_tokens = row.token_counts()
        text, tool_calls = preview(completion.message) if completion is not None else ("", ())
        unfinished = Outcome.ABORTED.value if row.delivered is False else OPEN
        return CallLine(
            id=call_id,
            session_id=self.session.id,
            parent_id=intent.parent_id,
            policy=intent.policy,
            agent=purpose.agent,
            kind=purpose.kind.value,
            rule=purpose.rule,
            mask=purpose.mask,
            created_at=intent.created_at,
            finished_at=completion.finished_at if completion is not None else None,
            dialect=intent.dialect,
            model=self.models[call_id],
            engine=completion.engine if completion is not None else "",
            outcome=completion.outcome.value if completion is not None else unfinished,
            finish=completion.finish.value if completion is not None else None,
            flaw=completion.flaw.value if completion is not None and completion.flaw is not None else None,
            error=completion.error if completion is not None else "",
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            shared=intent.shared,
            break_=self.breaks.get(call_id),
            versions=completion.versions if completion is not None else (),
            delivered=row.delivered,
            retry_of=self.retries.get(call_id),
            preview=text,
            tool_calls=tool_calls,
            fitted=intent.shape.fitted,
            token_ids=len(row.prompt_ids) > 0 or (completion is not None and len(completion.output_ids) > 0),
        )


def _retries(rows: list[CallRow]) -> dict[str, str]:
    """Calls of one request (`n` choices) have one body and start together: they are not retries of each other."""
    first: dict[str, CallRow] = {}
    retries: dict[str, str] = {}
    for row in rows:
        if not row.intent.body_hash:
            continue
        earlier = first.setdefault(row.intent.body_hash, row)
        ended_at = earlier.completion.finished_at if earlier.completion is not None else None
        if earlier is not row and ended_at is not None and ended_at <= row.intent.created_at:
            retries[row.intent.id] = earlier.intent.id
    return retries


READING_BYTES = 64_000_000
"""Limit of what is kept of parsed requests, as calls repeat the history of earlier ones."""


@cache
def _dialects() -> Mapping[str, Dialect]:
    """The dialects of this process's readers: what they keep was on record already, and parsing it is pure."""
    return open_dialects(CacheSpace(READING_BYTES))


def parse_request(dialect: str, request: RequestParts) -> ChatRequest | None:
    """Parses the request with its dialect; None if that fails (refused bodies, dialects that no longer exist)."""
    known = _dialects().get(dialect)
    if known is None:
        return None
    try:
        return known.parse_recorded(request.head, request.items, request.fixed)
    except (RequestError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def parse_call(intent: CallIntent, request: RequestParts, known: Collection[str]) -> ChatRequest | None:
    """Parses a call's request; None if that fails. The replies that it names are named by the ids of `known` calls.

    `previous` that names no known call (a vendor's own id) stands for the call's parent.
    """
    chat = parse_request(intent.dialect, request)
    if chat is None or (chat.previous is None and not chat.recalls):
        return chat
    previous = (_known_name(chat.previous, known) or intent.parent_id) if chat.previous is not None else None
    messages: list[Message] = []
    for message in chat.messages:
        if message.recall:
            handle = _known_name(message.handle, known)
            message = msgspec.structs.replace(message, handle=handle, recall=handle is not None)
        messages.append(message)
    return msgspec.structs.replace(chat, messages=tuple(messages), previous=previous)


def _known_name(handle: str | None, known: Collection[str]) -> str | None:
    call_id = recorded_name(handle)
    return call_id if call_id is not None and call_id in known else None


async def recalled(chat: ChatRequest, find: FindCall) -> ChatRequest:
    """Returns the request of `parse_call` with the history that it names, as the engine saw it. `find` gets call ids.

    A history that the record does not hold is left out.
    """
    try:
        return await _dialects()[chat.dialect].recall(chat, find)
    except RequestError:
        return chat


def view(message: Message) -> MessageView:
    parts: list[PartView] = []
    for part in message.parts:
        match part:
            case Image(url=url):
                parts.append(PartView("image", url=url))
            case Reasoning(text=text):
                parts.append(PartView("thinking", text))
            case _:
                parts.append(PartView("text", part.text))
    parts += [PartView("tool_call", call.arguments, call.name, call.id) for call in message.tool_calls]
    role = "system" if message.role == "developer" else message.role
    return MessageView(role, tuple(parts), message.name or "", message.tool_call_id or "", message.is_error)


def injected_view(message: InjectedMessage) -> MessageView:
    return MessageView(message.role, (PartView("text", message.text),), injected=True)


def reply_view(packed: bytes) -> MessageView | None:
    """Returns a completion's message; None if the call has none."""
    return view(reply_of(packed)) if packed else None


def reply_of(packed: bytes) -> Message:
    """A completion's message; of one that can't be read, its bytes as text: a page shows the others, too."""
    try:
        return from_json(packed, Message)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return Message("assistant", (Text(packed.decode("utf-8", "replace")),))


def refused_view(request: RequestParts) -> MessageView | None:
    """Returns the recorded body of a refused request; None if there is none."""
    try:
        head = any_json(request.head)
    except msgspec.MsgspecError:
        return None
    body = head.get("refused") if isinstance(head, dict) else None
    return MessageView("user", (PartView("text", body),)) if isinstance(body, str) else None


def common_prefix(first: Sequence[MessageView], second: Sequence[MessageView]) -> int:
    """Returns how many leading messages are equal. Thinking does not count, as harnesses may leave it out."""
    length = 0
    for one, other in zip(first, second, strict=False):
        if _comparable(one) != _comparable(other):
            break
        length += 1
    return length


def _comparable(message: MessageView) -> tuple[Any, ...]:
    content = tuple((part.kind, part.text, part.name, part.url) for part in message.parts if part.kind != "thinking")
    return message.role, content


MOST_TEXT = 256 << 20
"""The most characters of a session's transcript. Its calls may share a large text, which the record has once."""


def turns(rows: Sequence[CallRow]) -> tuple[CallTurn, ...]:
    """Returns what each call added, in order. Costs what is new in each request, not its history. Raises
    `RecordTooLarge` for more than `MOST_TEXT`."""
    added: list[CallTurn] = []
    left = MOST_TEXT
    items: dict[str, tuple[bytes, ...]] = {}
    replies: dict[str, MessageView | None] = {}
    systems: dict[str, tuple[MessageView, ...]] = {}
    for row in rows:
        intent = row.intent
        parent = intent.parent_id or ""
        items[intent.id] = extend_items(intent.id, items.get(parent, ()), intent.request)
        new, system = _new_messages(row, items[intent.id], systems.get(parent, ()), replies.get(parent))
        reply = reply_view(row.completion.message) if row.completion is not None else None
        replies[intent.id], systems[intent.id] = reply, system
        shown = (*new, *map(injected_view, intent.injected))
        left -= sum(len(part.text) + len(part.url) for message in shown for part in message.parts)
        if left < 0:
            raise RecordTooLarge(f"call {intent.id}: the session's texts have over {MOST_TEXT:,} characters")
        added.append(CallTurn(intent.id, intent.kind, intent.agent, shown, reply))
    return tuple(added)


def _new_messages(
    row: CallRow, items: tuple[bytes, ...], system: tuple[MessageView, ...], reply: MessageView | None
) -> tuple[list[MessageView], tuple[MessageView, ...]]:
    """Returns the messages that the parent's conversation does not hold, and the request's leading system messages."""
    dialect, request = row.intent.dialect, row.intent.request
    shared, chat, known_messages = request.items_shared, None, 0
    if shared:
        chat = parse_request(dialect, RequestParts(request.head, request.items, 0, request.fixed))
    if chat is None:  # nothing is shared, or the new items can't be parsed without the earlier ones
        chat = parse_request(dialect, RequestParts(request.head, items, 0, request.fixed))
        before = (
            parse_request(dialect, RequestParts(request.head, items[:shared], 0, request.fixed)) if shared else None
        )
        known_messages = len(before.messages) if before is not None else 0
    if chat is None:
        refused = refused_view(request)
        return ([refused] if refused is not None else []), ()
    messages = [view(message) for message in chat.messages]
    leading = tuple(messages[: next((i for i, m in enumerate(messages) if m.role != "system"), len(messages))])
    if shared or chat.previous:
        messages = messages[known_messages or common_prefix(system, messages) :]
        if messages and reply is not None and _comparable(messages[0]) == _comparable(reply):
            messages = messages[1:]
    return messages, leading or system


def preview(packed: bytes, characters: int = 200) -> tuple[str, tuple[str, ...]]:
    """Returns the beginning of a reply's text, and the names of the tools that it calls."""
    if not packed:
        return "", ()
    message = reply_of(packed)
    return message.text[:characters], tuple(call.name for call in message.tool_calls)


def plain(value: Mapping[str, Any]) -> dict[str, Any]:
    """Drops empty values: settings that a request left out are None in the record."""
    return {name: entry for name, entry in value.items() if entry not in (None, [], {}, "")}
