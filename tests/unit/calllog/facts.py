"""Facts to write into call logs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rolltap.calllog.facts import CallCompletion, CallIntent, CallLog, RequestParts
from rolltap.ids import new_id
from rolltap.types import Finish, Outcome, Session


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def a_session(**changes: object) -> Session:
    session_id = new_id()
    session = Session(session_id, "policy", f"hash of {session_id}", 1.5, 1e9, "rollout", None, {"tag": "välue\n"})
    return replace(session, **changes)  # type: ignore[arg-type]


def an_intent(session: Session | str, **changes: object) -> CallIntent:
    session_id = session if isinstance(session, str) else session.id
    request = RequestParts(b'{"model":"m"}', (b'{"role":"user"}',), 0, {"tools": b"[]"})
    intent = CallIntent(new_id(), session_id, "process", 2.5, "policy", "openai_chat", ids(1, 2, 3), request)
    return replace(intent, **changes)  # type: ignore[arg-type]


def a_completion(call_id: str, **changes: object) -> CallCompletion:
    done = CallCompletion(call_id, 3.5, Outcome.COMPLETED, Finish.STOP, ids(4, 5), np.array([-0.5, -0.25], np.float32))
    return replace(done, **changes)  # type: ignore[arg-type]


async def append(log: CallLog, session: Session, **changes: object) -> CallIntent:
    """A completed call of `session`; changes of `output_ids` go to its completion."""
    outputs = changes.pop("output_ids", ids(4, 5))
    intent = an_intent(session, **changes)
    await log.append_intent(intent)
    zeros = np.zeros(len(outputs), np.float32)  # type: ignore[arg-type]
    await log.append_completion(a_completion(intent.id, output_ids=outputs, logprobs=zeros))
    return intent
