"""The calls that `bench_calllog` writes: single ones made from real text, and a session that grows turn by turn."""

from __future__ import annotations

import json
import os
import re
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rolltap.calllog.facts import CallCompletion, CallIntent, CallLog, RequestParts
from rolltap.ids import new_id
from rolltap.types import Finish, Outcome, VersionSpan

VOCABULARY = 150_000


def real_text() -> str:
    """The standard library's sources: text with the repetition that tool outputs have."""
    folder = Path(os.__file__).parent
    return "".join((folder / name).read_text(encoding="utf-8") for name in ("argparse.py", "typing.py", "inspect.py"))


def tokens_of(text: str) -> np.ndarray:
    """A word or sign a token; its id is a hash within a large vocabulary. About four characters a token."""
    words = re.findall(r"\s?\w{1,7}|\s?[^\w\s]|\s+", text)
    return np.array([zlib.crc32(word.encode()) % VOCABULARY for word in words], np.int32)


@dataclass(frozen=True)
class Sample:
    """What calls are made of: `new` prompt tokens, `out` sampled ones, and the text of both."""

    new: list[np.ndarray]
    out: list[np.ndarray]
    logprobs: list[np.ndarray]
    texts: list[bytes]

    @classmethod
    def draw(cls, rng: np.random.Generator, new: int, out: int, count: int = 64) -> Sample:
        text = real_text()
        tokens = tokens_of(text)
        starts = rng.integers(0, len(tokens) - new - out, count)
        return cls(
            [tokens[at : at + new] for at in starts],
            [tokens[at + new : at + new + out] for at in starts],
            [-rng.exponential(0.3, out).astype(np.float32) for _ in starts],
            [text[4 * at : 4 * (at + new)].encode() for at in starts],
        )

    def intent(self, session: str, index: int) -> CallIntent:
        index %= len(self.new)
        return CallIntent(
            id=new_id(),
            session_id=session,
            process="bench",
            created_at=time.time(),
            policy="policy",
            dialect="openai_chat",
            new_ids=self.new[index],
            request=RequestParts(b'{"model":"policy","temperature":1.0,"stream":true}', (self.texts[index],)),
            body_hash="0" * 64,
            sampling_asked={"temperature": 1.0},
            sampling_sent={"temperature": 1.0, "max_tokens": 4096, "model": "policy"},
            lineage=bytes(80),
        )

    def completion(self, call_id: str, index: int) -> CallCompletion:
        index %= len(self.out)
        out = self.out[index]
        return CallCompletion(
            call_id=call_id,
            finished_at=time.time(),
            outcome=Outcome.COMPLETED,
            finish=Finish.STOP,
            output_ids=out,
            logprobs=self.logprobs[index],
            versions=(VersionSpan(1, 0, len(out)),),
            message=self.texts[index][: 4 * len(out)],
            usage={"prompt": 1000, "output": len(out)},
            engine="main",
            logprobs_mode="processed",
        )


class LongSession:
    """A session that grows by one turn at a time, written to a call log and counted as JSON.

    The JSON is what a gateway would log: each request as the harness sent it (its whole history), and each reply with
    its prompt ids, output ids and log-probs.
    """

    HEAD = b'{"model":"policy","temperature":1.0,"stream":true}'

    def __init__(self, log: CallLog, session: str, seed: int) -> None:
        self._log, self._session = log, session
        self._rng = np.random.default_rng(seed)
        self._text, self._at = real_text(), 20_000
        names = (f"tool_{number}" for number in range(12))
        self._tools = [
            {"type": "function", "function": {"name": name, "doc": self._text[number * 900 :][:900]}}
            for number, name in enumerate(names)
        ]
        self._messages: list[dict[str, Any]] = []
        self._parent: str | None = None
        self.context = np.empty(0, np.int32)
        self.json_bytes = 0

    async def add_turn(self) -> None:
        first = not self._messages
        asked = 9000 if first else 1750 + int(self._rng.integers(500))
        answered = 700 if first else 500 + int(self._rng.integers(300))
        new_text, reply = self._read(asked), self._read(answered)
        new, out = tokens_of(new_text), tokens_of(reply)
        logprobs = -self._rng.exponential(0.3, len(out)).astype(np.float32)
        resent = max(0, len(self._messages) - 1)  # what the parent's request held; its reply is new to the log
        self._messages.append({"role": "user" if first else "tool", "content": new_text})
        intent = self._intent(new, resent)
        await self._log.append_intent(intent)
        message = {"role": "assistant", "content": reply}
        completion = CallCompletion(
            intent.id, time.time(), Outcome.COMPLETED, Finish.STOP, out, logprobs, (VersionSpan(1, 0, len(out)),),
            message=json.dumps(message).encode(),
        )  # fmt: skip
        await self._log.append_completion(completion)
        prompt = np.concatenate([self.context, new])
        exchange = {
            "request": {"model": "policy", "messages": self._messages, "tools": self._tools},
            "response": message,
            "prompt_ids": prompt.tolist(),
            "output_ids": out.tolist(),
            "logprobs": [round(float(value), 6) for value in logprobs],
        }
        self.json_bytes += len(json.dumps(exchange))
        self._messages.append(message)
        self._parent, self.context = intent.id, np.concatenate([prompt, out])

    def _intent(self, new: np.ndarray, resent: int) -> CallIntent:
        messages = tuple(json.dumps(message).encode() for message in self._messages[resent:])
        request = RequestParts(self.HEAD, messages, resent, {"tools": json.dumps(self._tools).encode()})
        return CallIntent(
            new_id(), self._session, "bench", time.time(), "policy", "openai_chat", new, request,
            parent_id=self._parent, shared=len(self.context), lineage=self._rng.bytes(80),
        )  # fmt: skip

    def _read(self, characters: int) -> str:
        text = self._text[self._at : self._at + characters]
        self._at += characters
        return text
