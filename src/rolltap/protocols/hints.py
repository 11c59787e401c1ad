"""Reads hints from a harness's headers and metadata: they suggest a call's lineage and kind, never its identity.

| harness | conversation | agent | parent |
|---|---|---|---|
| Codex | `session-id` | `thread-id` where it is not the session's | `x-codex-parent-thread-id` |
| Claude Code | `x-claude-code-session-id`, `metadata.user_id` | `x-claude-code-agent-id` | |
| OpenCode | `x-session-id`, `x-session-affinity` | `x-session-id` where there is a parent | `x-parent-session-id` |
| Copilot | | `x-interaction-type` | |
| Pi | `session_id` | | |
| OpenHands | `x-litellm-session-id` | | |
| Mistral Vibe | `x-affinity` | | |
| any OpenAI client | `prompt_cache_key` | | |

The kind of a call comes from Copilot's `x-interaction-type` and Codex's `x-openai-subagent` and `request_kind` (turn
metadata).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import msgspec

from rolltap.errors import InvalidRequest
from rolltap.protocols.conversation import Hints
from rolltap.protocols.requests import decode

_CONVERSATION = (
    "session-id",
    "x-claude-code-session-id",
    "x-session-id",
    "session_id",
    "x-litellm-session-id",
    "x-session-affinity",
    "x-affinity",
)
_PARENT = ("x-codex-parent-thread-id", "x-parent-session-id")
_KEPT = (
    *_CONVERSATION,
    *_PARENT,
    "thread-id",
    "x-openai-subagent",
    "x-codex-window-id",
    "x-codex-turn-metadata",
    "x-claude-code-agent-id",
    "x-interaction-type",
    "x-initiator",
    "x-stainless-retry-count",
    "x-client-request-id",
    "user-agent",
    "traceparent",
    "tracestate",
    "anthropic-beta",
)
_SUMMARY_KINDS = frozenset({"compaction", "conversation-compaction", "compact"})
_AUXILIARY_KINDS = frozenset({"title", "conversation-title", "memory"})
_MAX_VALUE = 2048

NO_HINTS = Hints()

S = TypeVar("S", bound=msgspec.Struct)


class _TurnMetadata(msgspec.Struct):
    request_kind: str | None = None


class _ClaudeUser(msgspec.Struct):
    session_id: str | None = None


def read_hints(headers: Mapping[str, str], *, cache_key: str | None = None, user_id: str | None = None) -> Hints:
    """Returns the hints of one request. `cache_key` is `prompt_cache_key`, `user_id` Anthropic's `metadata.user_id`."""
    raw = {name: headers[name][:_MAX_VALUE] for name in _KEPT if headers.get(name)}
    if not raw and not cache_key and not user_id:
        return NO_HINTS
    if cache_key:
        raw["prompt_cache_key"] = cache_key[:_MAX_VALUE]
    if user_id:
        raw["metadata.user_id"] = user_id[:_MAX_VALUE]
    conversation = _first_present(raw, _CONVERSATION) or _claude_session(user_id) or raw.get("prompt_cache_key")
    parent = _first_present(raw, _PARENT)
    retry = raw.get("x-stainless-retry-count")
    return Hints(
        conversation=conversation,
        agent=_agent(raw, parent, conversation),
        kind=_kind(headers),
        retry=int(retry) if retry is not None and retry.isascii() and retry.isdigit() and len(retry) < 5 else 0,
        raw=raw,
    )


def _first_present(raw: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((raw[name] for name in names if name in raw), None)


def _agent(raw: Mapping[str, str], parent: str | None, conversation: str | None) -> str | None:
    """Returns the subagent's name; None for the main agent."""
    if agent := raw.get("x-claude-code-agent-id"):
        return agent
    thread = raw.get("thread-id")
    if thread is not None and thread != conversation:
        return thread
    if parent is not None:
        return raw.get("x-session-id") or raw.get("x-openai-subagent")
    interaction = raw.get("x-interaction-type", "")
    return interaction if "subagent" in interaction else None


def _kind(headers: Mapping[str, str]) -> str | None:
    metadata = headers.get("x-codex-turn-metadata")
    kinds = [headers.get("x-interaction-type"), headers.get("x-openai-subagent")]
    if metadata is not None:
        kinds.append(_decode_or_default(metadata, _TurnMetadata()).request_kind)
    if any(kind in _SUMMARY_KINDS for kind in kinds):
        return "summary"
    if any(kind in _AUXILIARY_KINDS for kind in kinds):
        return "auxiliary"
    return None


def _claude_session(user_id: str | None) -> str | None:
    return _decode_or_default(user_id, _ClaudeUser()).session_id if user_id and user_id.startswith("{") else None


def _decode_or_default(text: str, default: S) -> S:
    """Decodes a header's JSON. Returns the default if it is unreadable: a hint is optional."""
    try:
        return decode(text.encode("utf-8", "replace"), type(default))
    except InvalidRequest:
        return default
