"""`rolltap doctor`: checks the set-up, and says what to do about what is wrong."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path

from rich.table import Table
from rich.text import Text

from rolltap.cli.checks import Finding, check_engines, check_store
from rolltap.cli.screen import Screen
from rolltap.errors import RolltapError
from rolltap.settings import load_settings

EXTRAS = {
    "tokens": ("tokenizers", "renderers", "jinja2"),
    "train": ("torch", "transformers", "safetensors"),
    "demo": ("minisweagent", "litellm", "matplotlib"),
    "postgres": ("asyncpg", "alembic"),
    "redis": ("redis",),
    "ray": ("ray",),
    "export": ("pyarrow",),
}


async def check(config: Path | None) -> bool:
    """Prints the table; True if nothing that is configured is broken."""
    findings = [_python(), *_extras(), *_programs()]
    if config is not None:
        findings += await _configured(config)
    else:
        findings.append(Finding("settings", "none here", "write a rolltap.toml, or use `rolltap serve --engine URL`"))
    table = Table("what", "state", "what to do")
    for finding in findings:
        style = None if finding.healthy else "red"
        table.add_row(*(Text(cell) for cell in (finding.what, finding.state, finding.advice)), style=style)
    Screen().print(table)
    return all(finding.healthy for finding in findings)


def audit(model: Path) -> bool:
    """Prints whether the folder's chat template may be bridged, role by role, and the form of its tool calls; True if
    every role may."""
    from rolltap.proxy.continuation.template import TemplateRenderer
    from rolltap.proxy.continuation.tokenizer import HubTokenizer

    renderer = TemplateRenderer(HubTokenizer(model))
    results = renderer.audit
    table = Table("new messages", "bridged", "why not", title=f"chat template of {model}")
    for result in results:
        table.add_row(result.scenario.replace("_", " "), "yes" if result.admitted else "no", result.reason)
    Screen().print(table)
    unread = "written in no known form, so they come as text: name the policy's family or tool_format"
    Screen().print(f"tool calls: {unread if renderer.tool_format == 'none' else renderer.tool_format}", soft_wrap=True)
    return all(result.admitted for result in results)


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    return Finding("python", version)


def _extras() -> list[Finding]:
    findings = []
    for extra in EXTRAS:
        missing = missing_modules(extra)
        advice = f"pip install 'rolltap[{extra}]' if you need it" if missing else ""
        findings.append(Finding(f"extra {extra}", f"missing {', '.join(missing)}" if missing else "installed", advice))
    return findings


def missing_modules(extra: str) -> list[str]:
    """The modules of an extra that can't be imported here."""
    return [name for name in EXTRAS[extra] if importlib.util.find_spec(name) is None]


def _programs() -> list[Finding]:
    wanted = {"bwrap": "sandboxed rollouts", "docker": "rollouts in containers", "node": "npm harnesses"}
    return [
        Finding(name, path or "not found", "" if path else f"only needed for {use}")
        for name, use in wanted.items()
        for path in [shutil.which(name)]
    ]


async def _configured(config: Path) -> list[Finding]:
    try:
        settings = load_settings(config)
    except RolltapError as error:
        return [Finding(f"settings {config}", "broken", error.message, healthy=False)]
    return [Finding(f"settings {config}", "fine"), await check_store(settings), *await check_engines(settings)]
