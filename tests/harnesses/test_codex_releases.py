"""The newest three releases of Codex, by the definition and by the way of its own settings, without a line of error.

With its built-in provider Codex asks for a WebSocket first and is answered 426: it logs that once, and uses HTTP.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rolltap.harnesses.agents.codex import Codex
from rolltap.harnesses.base import Command, Ending, Job

from .conftest import installed
from .house import house
from .matrix import Cell
from .scenarios import SCENARIOS, TOOLS
from .test_matrix import through

NEWEST = ("0.171.0", "0.169.0", "0.166.0")
ERROR = re.compile(r"^.*\b(?:error|failed|reconnecting)\b.*$", re.IGNORECASE | re.MULTILINE)
NO_WEBSOCKET = "failed to connect to "
"""What Codex itself logs of any WebSocket that it doesn't get."""

REFUSED = ("rolltap_http_responses_total", {"plane": "agent", "status": "426"})


class Release(Codex):
    """The definition with another release."""

    def __init__(self, version: str) -> None:
        self.package = replace(Codex.package, version=version)


class BuiltInProvider(Release):
    """As a user points it: the vendor's own provider at another address, which it asks for a WebSocket."""

    def launch(self, job: Job) -> Command:
        argv = ["codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
        argv += ["-m", job.endpoint.model, "-c", f"openai_base_url={json.dumps(job.endpoint.v1)}"]
        argv += ["-c", "check_for_update_on_startup=false", "-c", "analytics.enabled=false"]
        argv += ["--disable", "plugins", "--disable", "apps", job.instruction]
        return Command(tuple(argv), env={"CODEX_API_KEY": job.endpoint.key})


@pytest.mark.harness
@pytest.mark.timeout(400)
@pytest.mark.parametrize("version", NEWEST)
@pytest.mark.parametrize("way", [Release, BuiltInProvider])
async def test_a_release_runs_without_a_line_of_error(
    way: type[Release],
    version: str,
    note_cell: Callable[[Cell], None],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    harness = way(version)
    installation = await asyncio.to_thread(installed, harness.package)
    scenario = SCENARIOS["basic"]
    async with house(scenario.script(TOOLS["codex"]), tmp_path) as home:
        run = await through(home, harness, installation, scenario)
        refused = home.app.services.recorder.metrics.registry.get_sample_value(*REFUSED) or 0
    note_cell(Cell.of(harness, "basic" if way is Release else "WebSocket refused", run))
    assert refused == (0 if way is Release else 1), "WebSockets asked for"
    (exit_,) = run.exits
    assert exit_.ending is Ending.DONE, exit_.output
    errors = ERROR.findall(exit_.output)
    assert len(errors) == refused, exit_.output
    assert all(NO_WEBSOCKET in line and "ebsocket" in line for line in errors)
    assert not [record.getMessage() for record in caplog.records if record.levelname in ("WARNING", "ERROR")]
    assert run.files == scenario.makes
    assert [call["break_"] for call in run.calls] == [None] * 3
    assert run.check["verdict"] == "match", run.check
