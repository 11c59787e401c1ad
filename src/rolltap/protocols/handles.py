"""Handles: call names in fields that the protocol makes a client send back.

A handle is `call_` + the 20-character call id + 2 characters of position + 12 characters of a keyed hash (60 bits). It
fits the 40 characters that OpenAI clients allow. Any field that a client must send back can hold it: a tool-call id,
an item id, a response id, encrypted content, a thinking signature. A handle that this installation did not mint is no
error: it is ignored and counted.
"""

from __future__ import annotations

import hmac
from hashlib import blake2b

from rolltap.ids import ALPHABET, ID_LENGTH
from rolltap.protocols.conversation import ChatRequest, Reasoning

PREFIX = "call_"
_MAC_LENGTH = 12
_POSITION_LENGTH = 2
HANDLE_LENGTH = len(PREFIX) + ID_LENGTH + _POSITION_LENGTH + _MAC_LENGTH
MAX_POSITION = 32**_POSITION_LENGTH - 1
MAX_CALLS = 128
"""Maximum number of tool calls in a reply, as each needs a position. A model that makes more is in a loop."""


class Handles:
    """Mints and reads handles with one secret (at least 16 bytes, shared by all replicas of a proxy)."""

    def __init__(self, secret: bytes) -> None:
        if len(secret) < 16:
            raise ValueError("the handles' secret needs at least 16 bytes")
        self._secret = secret[:64]
        self.forged = 0

    def mint(self, call_id: str, position: int = 0) -> str:
        """The handle of the part at `position` in a call's reply."""
        if not 0 <= position <= MAX_POSITION:
            raise ValueError(f"a handle's position is 0 to {MAX_POSITION}, not {position}")
        body = call_id + ALPHABET[position // 32] + ALPHABET[position % 32]
        return PREFIX + body + self._mac(body)

    def read(self, text: str | None) -> str | None:
        """The call id in a handle that we minted, else None. It may have a protocol prefix (`rs_`, `msg_`, `resp_`)."""
        handle = _handle_in(text)
        if handle is None:
            return None
        body, mac = handle[len(PREFIX) : -_MAC_LENGTH], handle[-_MAC_LENGTH:]
        if not hmac.compare_digest(mac.encode(), self._mac(body).encode()):
            self.forged += 1
            return None
        return body[:ID_LENGTH]

    def last_named(self, request: ChatRequest) -> list[str]:
        """The call ids in the handles of the request's last assistant message."""
        texts: list[str | None] = [request.previous]
        for message in reversed(request.messages):
            if message.role == "assistant":
                texts.append(message.handle)
                texts += [call.id for call in message.tool_calls]
                texts += [part.handle for part in message.parts if isinstance(part, Reasoning)]
                break
        return [call_id for text in texts if (call_id := self.read(text))]

    def _mac(self, body: str) -> str:
        digest = int.from_bytes(blake2b(body.encode(), key=self._secret, digest_size=8).digest(), "little")
        return "".join(ALPHABET[digest >> 5 * place & 31] for place in range(_MAC_LENGTH))


def recorded_name(text: str | None) -> str | None:
    """The call id in a handle of a recorded request, else None. The proxy checked the handle before it recorded it."""
    handle = _handle_in(text)
    return handle[len(PREFIX) :][:ID_LENGTH] if handle is not None else None


def _handle_in(text: str | None) -> str | None:
    if not text or PREFIX not in text:
        return None
    handle = text[text.index(PREFIX) :]
    return handle if len(handle) == HANDLE_LENGTH else None
