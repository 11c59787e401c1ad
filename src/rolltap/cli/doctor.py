"""`rolltap doctor`: checks the set-up, and says what to do about what is wrong."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from rolltap.cli.checks import check_engines, check_store, check_tokenizers
from rolltap.cli.harness import NOT_INSTALLED, TESTED_RELEASE, installed
from rolltap.cli.screen import Screen
from rolltap.cli.server_doctor import diagnose
from rolltap.contract.diagnosis import Finding
from rolltap.errors import RolltapError
from rolltap.extras import install_line
from rolltap.harnesses import protection
from rolltap.harnesses.base import Harness
from rolltap.harnesses.registry import get_harness, harness_names
from rolltap.harnesses.runtimes import bubblewrap
from rolltap.harnesses.runtimes.cgroup import own_cgroup
from rolltap.harnesses.runtimes.machine import limits_here
from rolltap.harnesses.tested import release_results
from rolltap.settings import Settings, load_settings

if TYPE_CHECKING:
    from rolltap.proxy.continuation.fit import Fitting

EXTRAS = {
    "tokens": ("tokenizers", "renderers", "jinja2", "httpx"),
    "train": ("torch", "transformers", "safetensors"),
    "demo": ("minisweagent", "litellm", "matplotlib"),
    "postgres": ("asyncpg", "alembic"),
    "redis": ("redis",),
    "ray": ("ray",),
    "export": ("pyarrow",),
    "lora": ("peft",),
    "otel": ("opentelemetry",),
    "harbor": ("harbor",),
    "trl": ("trl", "datasets"),
    "tinker": ("tinker",),
    "verl": ("verl", "transfer_queue"),
    "openenv": ("openenv",),
    "art": ("art",),
    "skyrl": ("skyrl",),
}
"""The modules of each extra that users install."""


async def check(config: Path | None) -> bool:
    """Prints the table; True if nothing that is configured is broken."""
    findings = [_python(), *_extras(), *_programs(), _limits(), _rewards(), *await _harnesses()]
    if config is not None:
        findings += await _configured(config)
    else:
        findings.append(Finding("settings", "none here", "write a rolltap.toml, or use `rolltap serve --engine URL`"))
    return _print(findings)


async def check_engine(url: str, kind: str) -> bool:
    """Prints what a model server can do: it samples a few tokens there. True if rolltap can use it."""
    settings = Settings.model_validate({"engines": {"main": {"url": url, "kind": kind}}})
    return _print(await check_engines(settings))


def check_servers(urls: Sequence[str], config: Path | None) -> bool:
    """Prints what running servers find out about themselves, and how they differ. True if nothing is broken."""
    printed = [_print(findings, title) for title, findings in diagnose(urls, config)]
    return all(printed)


def _print(findings: Sequence[Finding], title: str | None = None) -> bool:
    table, screen = Table("what", "state", title=title, title_justify="left"), Screen(highlight=False)
    for finding in findings:
        table.add_row(Text(finding.what), Text(finding.state), style=_style(finding))
    screen.print(table)
    for finding in findings:
        if finding.advice:  # below: a command must be whole in a narrow terminal
            screen.print(f"{finding.what}: {finding.advice}", style=_style(finding), soft_wrap=True)
    return all(finding.healthy for finding in findings)


def _style(finding: Finding) -> str | None:
    return None if finding.healthy else "red"


def audit(model: Path, family: str = "") -> bool:
    """Prints what the folder's chat template, or a family's renderer, does with conversations: whether new messages are
    bridged (of a template), which shapes are made to fit and how, and the form of tool calls. True if all are."""
    from rolltap.proxy.continuation.fit import find_fitting
    from rolltap.proxy.continuation.rendering import FamilyRenderer
    from rolltap.proxy.continuation.template import TemplateRenderer
    from rolltap.proxy.continuation.tokenizer import HubTokenizer

    tokenizer, screen = HubTokenizer(model), Screen()
    renderer = FamilyRenderer(family, tokenizer) if family else TemplateRenderer(tokenizer)
    results = renderer.audit if isinstance(renderer, TemplateRenderer) else ()
    if results:
        table = Table("new messages", "bridged", "why not", title=f"chat template of {model}")
        for result in results:
            table.add_row(result.scenario.replace("_", " "), "yes" if result.admitted else "no", result.reason)
        screen.print(table)
    fitting = find_fitting(renderer)
    _print_fitting(fitting)
    if isinstance(renderer, TemplateRenderer):
        unread = "written in no known form, so they come as text: name the policy's family or tool_format"
        form = unread if renderer.tool_format == "none" else renderer.tool_format
        screen.print(f"tool calls: {form}", soft_wrap=True)
    if not fitting.shows_tools:
        screen.print("tools: the template does not write them, so the model can't know them", soft_wrap=True)
    efforts = renderer.efforts
    levels = ", ".join(f"{level} (unasked)" if level == efforts.default else level for level in efforts.levels)
    screen.print(f"effort: {levels or 'no levels'}", soft_wrap=True)
    return all(result.admitted for result in results) and not any(result.problem for result in fitting.table)


def _print_fitting(fitting: Fitting) -> None:
    from rolltap.proxy.continuation.fit import IDS_IN_FORM, RULES

    table, screen = Table("shape of a conversation", "made to fit by", title="what the template takes"), Screen()
    for result in fitting.table:
        state = result.problem or ", ".join(rule.replace("_", " ") for rule in result.rules)
        table.add_row(result.shape, state, style="red" if result.problem else None)
    screen.print(table)
    for rule in dict.fromkeys(rule for result in fitting.table for rule in result.rules):
        meaning = f"call ids have the form {fitting.id_form}" if rule == IDS_IN_FORM else RULES[rule][0]
        screen.print(f"{rule.replace('_', ' ')}: {meaning}", soft_wrap=True)


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    return Finding("python", version)


def _extras() -> list[Finding]:
    findings = []
    for extra in EXTRAS:
        missing = missing_modules(extra)
        advice = f"{install_line(extra)} if you need it" if missing else ""
        findings.append(Finding(f"extra {extra}", f"missing {', '.join(missing)}" if missing else "installed", advice))
    return findings


def missing_modules(extra: str) -> list[str]:
    """The modules of an extra that can't be imported here."""
    return [name for name in EXTRAS[extra] if importlib.util.find_spec(name) is None]


def _programs() -> list[Finding]:
    programs = {"bwrap": "sandboxed rollouts", "docker": "rollouts in containers", "node": "npm harnesses"}
    return [
        Finding(name, path or "not found", "" if path else f"only needed for {use}")
        for name, use in programs.items()
        for path in [shutil.which(name)]
    ]


def _limits() -> Finding:
    state, advice = limits_here(own_cgroup(), os.getuid(), platform.release())
    return Finding("limits of runs", state, advice)


def _rewards() -> Finding:
    """What code of an agent can reach while its reward is made, in the runtime that this machine has for commands."""
    refusal = bubblewrap.refusal()
    runtime = "process" if refusal else "bubblewrap"
    advice = f"no sandbox here ({refusal.splitlines()[0]}): apt install bubblewrap" if refusal else ""
    return Finding(f"code under evaluation ({runtime})", f"reaches: {protection.described(runtime)}", advice)


async def _harnesses() -> list[Finding]:
    """The harnesses that are on this machine, each with the release that was tested. Asks each on PATH its version."""
    harnesses = [get_harness(name) for name in harness_names()]
    rows = await asyncio.gather(*(asyncio.to_thread(_harness, harness) for harness in harnesses))
    return [row for row in rows if row] or [
        Finding("harnesses", "none that rolltap knows", "rolltap harness list; rolltap harness install NAME")
    ]


def _harness(harness: Harness) -> Finding | None:
    """None where it is not on this machine."""
    package, here = harness.package, installed(harness)
    if package is None or here in ("", NOT_INSTALLED):
        return None
    tested = f"tested {package.version}"
    ran = next((one for one in release_results(harness.name) if one.release == package.version), None)
    if ran is not None:
        tested += f", {ran.result} runs as expected on {ran.day}"
    if here.startswith(TESTED_RELEASE):
        return Finding(f"harness {harness.name}", tested)
    advice = f"rolltap harness install {harness.name} adds the tested release"
    return Finding(f"harness {harness.name}", f"{here}; {tested}", advice)


async def _configured(config: Path) -> list[Finding]:
    try:
        settings = load_settings(config)
    except RolltapError as error:
        return [Finding(f"settings {config}", "broken", error.message, healthy=False)]
    findings = [Finding(f"settings {config}", "fine"), await check_store(settings), *check_tokenizers(settings)]
    return findings + await check_engines(settings)
