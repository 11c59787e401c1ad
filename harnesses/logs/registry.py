"""The log readers by harness."""

from __future__ import annotations

from collections.abc import Mapping

from rolltap.errors import TaskInvalid
from rolltap.extras import known_names, lookup
from rolltap.harnesses.logs.atif import read_atif
from rolltap.harnesses.logs.base import LogReader
from rolltap.harnesses.logs.claude_code import read_claude_code
from rolltap.harnesses.logs.codex import read_codex
from rolltap.harnesses.logs.gemini_cli import read_gemini_cli
from rolltap.harnesses.logs.mini_swe_agent import read_mini_swe_agent
from rolltap.harnesses.logs.opencode import read_opencode
from rolltap.harnesses.logs.pi import read_pi
from rolltap.harnesses.logs.qwen_code import read_qwen_code

ENTRY_POINTS = "rolltap.harness_logs"

LOG_READERS: Mapping[str, LogReader] = {
    "codex": read_codex,
    "claude-code": read_claude_code,
    "claude-agent-sdk": read_claude_code,
    "pi": read_pi,
    "qwen-code": read_qwen_code,
    "gemini-cli": read_gemini_cli,
    "opencode": read_opencode,
    "mini-swe-agent": read_mini_swe_agent,
    "command": read_atif,
}


def log_reader(harness: str) -> LogReader | None:
    """The built-in or installed reader of this harness's log; None if there is none."""
    if harness not in known_names(LOG_READERS, ENTRY_POINTS):
        return None
    return lookup("harness log", harness, LOG_READERS, ENTRY_POINTS, TaskInvalid)
