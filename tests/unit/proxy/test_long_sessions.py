"""What a call does must not grow with its session: function calls are counted, which a busy machine does not change."""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType
from typing import Any

import msgspec

EARLY, LATE = 20, 400


async def functions_called(plane: Any, history: list[dict[str, Any]]) -> Counter[str]:
    """How often each function of the product ran or called a built-in one, over one call."""
    counts: Counter[str] = Counter()

    def count(frame: FrameType, event: str, function: Any) -> None:
        if event in ("call", "c_call") and "rolltap" in (path := frame.f_code.co_filename) and "/tests/" not in path:
            counts[f"{path.rpartition('/')[2]} {frame.f_code.co_name}"] += 1

    sys.setprofile(count)
    try:
        answer = await plane.client.chat(*history)
    finally:
        sys.setprofile(None)
    assert answer.status == 200, answer.body[:300]
    history.append(msgspec.json.decode(answer.body)["choices"][0]["message"])
    return counts


async def test_a_call_calls_no_more_functions_late_than_early(plane: Any) -> None:
    """A function that looks at each message once makes hundreds of calls more at turn 400."""
    history: list[dict[str, Any]] = []
    plane.policy.source.max_context = 100_000
    early: Counter[str] = Counter()
    late: Counter[str] = Counter()
    for turn in range(LATE + 1):
        history.append({"role": "user", "content": f"turn {turn}: list the files"})
        late = await functions_called(plane, history)
        if turn == EARLY:
            early = late
    grown = {name: (early[name], count) for name, count in late.items() if count > early[name] + LATE / 4}
    assert not grown
