"""A part of a run: writes two steps into a sink. `python -m tests.trainers.sink_part OUT SINK FIRST_STEP`."""

from __future__ import annotations

import sys
from pathlib import Path

from rolltap.trainer_client.run.metrics import StepReport
from rolltap.trainer_client.run.sinks import open_sinks

if __name__ == "__main__":
    out, name, first = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    (sink,) = open_sinks([name], out, "project", "trainer")
    values = {**dict.fromkeys(StepReport.__slots__, 0), "staleness": {}, "seconds": {}, "mismatch": {}}
    sink.begin(first - 1)
    for step in (first, first + 1):
        sink.write(StepReport(**{**values, "step": step, "reward": float(step)}))  # type: ignore[arg-type]
    sink.close()
