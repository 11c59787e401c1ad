"""`rolltap doctor --server`: what running servers find out about themselves, and how they differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rolltap.cli.client import PlaneClient
from rolltap.cli.common import connect
from rolltap.contract.diagnosis import Diagnosis, Finding
from rolltap.http_client import Request, read_as

MOST_ASKED = 8
KNOWN_IN_A_ROW = 2
"""Behind a balancer, or with --workers, each request may reach another process. After so many known ones they are all
taken to be known."""


def diagnose(urls: Sequence[str], config: Path | None) -> Iterator[tuple[str, Sequence[Finding]]]:
    """A title and findings for each process that is reached at `urls`, and last for what differs between them."""
    reached: dict[tuple[str, int], Diagnosis] = {}
    for url in urls:
        plane = connect("admin", config, url)
        for found in _processes(plane):
            reached.setdefault((found.host, found.process), found)
    for (host, process), found in reached.items():
        yield f"rolltap {found.version} on {host} (process {process})", found.findings
    if differing := differences(list(reached.values())):
        yield "between them", differing


def _processes(plane: PlaneClient) -> list[Diagnosis]:
    """Those that answer at one address."""
    found: dict[tuple[str, int], Diagnosis] = {}
    known = 0
    for _ in range(MOST_ASKED):
        answer = plane.send(Request("GET", "/diagnosis", parse=read_as(Diagnosis), once=True))
        known = known + 1 if (answer.host, answer.process) in found else 0
        found.setdefault((answer.host, answer.process), answer)
        if known == KNOWN_IN_A_ROW:
            break
    return list(found.values())


def differences(diagnoses: Sequence[Diagnosis]) -> list[Finding]:
    """Findings for versions and policies that not all of them have."""
    findings: list[Finding] = []
    by_version = _by(diagnoses, lambda one: [one.version])
    if len(by_version) > 1:
        state = "; ".join(f"{version} on {', '.join(map(_name, some))}" for version, some in sorted(by_version.items()))
        findings.append(Finding("versions", state, "upgrade the older ones, one after the other"))
    lacking = {
        policy: [one for one in diagnoses if policy not in one.policies] for policy in sorted(_by(diagnoses, _policies))
    }
    if any(lacking.values()):
        state = "; ".join(
            f"{policy} is not on {', '.join(map(_name, without))}" for policy, without in lacking.items() if without
        )
        advice = "calls of such a policy get 404 there: give all proxies the same [policies] and restart them"
        findings.append(Finding("policies", state, advice, healthy=False))
    return findings


def _policies(diagnosis: Diagnosis) -> Sequence[str]:
    return diagnosis.policies


def _by(diagnoses: Sequence[Diagnosis], values: Any) -> Mapping[str, list[Diagnosis]]:
    grouped: dict[str, list[Diagnosis]] = {}
    for one in diagnoses:
        for value in values(one):
            grouped.setdefault(value, []).append(one)
    return grouped


def _name(diagnosis: Diagnosis) -> str:
    return f"{diagnosis.host} (process {diagnosis.process})"
