"""A process of the deployment: started, watched, started again when it ends, and stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

AT_ONCE_S = 5.0
"""A process that lived for longer is started again at once."""

LONGEST_PAUSE_S = 30.0


@dataclass(slots=True, eq=False)
class Child:
    """One process in a session of its own, so that a Ctrl-C in the terminal reaches only its parent.

    `user` is the account that it runs as, where this one is not to be used. `wanted`: it is started again when it ends.
    """

    name: str
    command: list[str]
    log: Path
    env: Mapping[str, str] = field(default_factory=dict)
    user: str | None = None
    stop_signal: signal.Signals = signal.SIGTERM
    wanted: bool = True
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    failures: int = 0  # ends within `AT_ONCE_S`, one after another
    again_at: float = 0.0  # on the monotonic clock; 0: it runs, or its end was not seen yet

    def start(self) -> None:
        """Its output is appended to `log`. Variables of rolltap's that this process has are not passed on."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("ROLLTAP_")}
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**inherited, **self.env},
                user=self.user,
                cwd="/" if self.user else None,  # this folder may be closed to that user
                start_new_session=True,
            )
        self.started_at, self.again_at = time.monotonic(), 0.0

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def look(self) -> str:
        """Starts it again where it has ended: at once if it had lived for a while, else after a pause that doubles.

        Returns what there is to tell, or "".
        """
        if not self.wanted or self.process is None or self.process.poll() is None:
            return ""
        now = time.monotonic()
        if self.again_at == 0.0:
            self.failures = self.failures + 1 if now < self.started_at + AT_ONCE_S else 0
            self.again_at = now + (min(LONGEST_PAUSE_S, 2.0 ** (self.failures - 1)) if self.failures else 0.0)
        if now < self.again_at:
            return ""
        code = self.process.returncode
        self.start()
        return f"{self.name} ended with {code} and is started again; its log: {self.log}"

    def signal(self, number: signal.Signals) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)

    def wait(self, within: float) -> bool:
        """Whether it ended within so many seconds. Then everything that it started is ended as well."""
        if self.process is None:
            return True
        try:
            self.process.wait(within)
        except subprocess.TimeoutExpired:
            return False
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        return True

    def kill(self) -> None:
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def tail(self, lines: int = 5) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
