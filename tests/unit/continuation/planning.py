"""Runs the steps of a plan one after the other."""

from __future__ import annotations

from typing import Any

from rolltap.proxy.continuation.plan import PromptPlan, Rendering


def run_steps(steps: Rendering) -> PromptPlan:
    """The plan that `Continuation.steps` ends with."""
    result: Any = None
    while True:
        try:
            _, work = steps.send(result)
        except StopIteration as end:
            return end.value
        result = work()
