"""`rolltap serve --log-format json`: its stderr is for machines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .service import end, service


@pytest.mark.acceptance
async def test_stderr_holds_json_only_and_no_link_with_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLTAP_LOG_FORMAT", "json")
    async with service(tmp_path) as running:
        assert await end(running.server) == 0
    lines = (tmp_path / "serve.log").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    (up,) = [event for event in events if event["message"] == "rolltap is up"]
    assert up["planes"]["admin"] == running.admin_url
    assert "token=" not in "".join(lines)
