"""Named points at which the fault suite kills this process. They do nothing unless `ROLLTAP_CRASH_AT` names one.

`ROLLTAP_CRASH_AT=completion.written:3` is death by SIGKILL when the third call passes that point: no handler runs,
nothing is flushed.
"""

from __future__ import annotations

import os
import signal
import threading

_lock = threading.Lock()
_name, _left = "", 0


def arm(point: str) -> None:
    """Sets the one point, as `NAME` or `NAME:COUNT`; the empty string sets none."""
    global _name, _left
    _name, _, count = point.partition(":")
    _left = int(count or 1)


def crash_point(name: str) -> None:
    """Ends the process here if this is the point, and its turn."""
    global _left
    if name != _name:
        return
    with _lock:
        _left -= 1
        if _left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


arm(os.environ.get("ROLLTAP_CRASH_AT", ""))
