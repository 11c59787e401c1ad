"""Looks for known vulnerabilities in the tested set, and writes what it consists of: `make audit`.

    python scripts/audit.py        reports/sbom.cdx.json (CycloneDX) and the advisories of requirements/tested.txt

Ends with 1 where an advisory concerns a pin. Where the advisory data can't be reached nothing is known, and it says so;
`--strict` makes that 3.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TOOLS = ROOT / ".cache" / "audit"
PINNED = ("pip-audit==2.10.1", "cyclonedx-bom==7.5.0")
REQUIREMENTS = ROOT / "requirements" / "tested.txt"
SBOM = ROOT / "reports" / "sbom.cdx.json"


def tool(name: str) -> str:
    """A pinned tool, in an environment of its own."""
    path = TOOLS / "bin" / name
    if not path.exists():
        subprocess.run([sys.executable, "-m", "venv", str(TOOLS)], check=True)
        subprocess.run([str(TOOLS / "bin" / "python"), "-m", "pip", "install", "-q", *PINNED], check=True)
    return str(path)


def write_sbom() -> int:
    """How many components there are."""
    SBOM.parent.mkdir(exist_ok=True)
    command = [tool("cyclonedx-py"), "requirements", str(REQUIREMENTS), "--pyproject", str(ROOT / "pyproject.toml")]
    subprocess.run([*command, "--output-reproducible", "-o", str(SBOM)], check=True, stderr=subprocess.DEVNULL)
    return len(json.loads(SBOM.read_text(encoding="utf-8"))["components"])


def advisories() -> list[dict[str, Any]] | None:
    """Each pin with its `vulns`; None where none could be looked up."""
    command = [tool("pip-audit"), "-r", str(REQUIREMENTS), "--disable-pip", "--require-hashes", "-f", "json"]
    run = subprocess.run([*command, "--progress-spinner", "off"], capture_output=True, text=True)
    try:
        pins = json.loads(run.stdout)["dependencies"]
    except (ValueError, KeyError):
        print(run.stderr.strip().rpartition("\n")[2], file=sys.stderr)
        return None
    return looked_up(pins)


def looked_up(pins: Sequence[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """The pins that were looked up: pip-audit ends with 0 where it could look up none."""
    known = [pin for pin in pins if "skip_reason" not in pin]
    return known or None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strict", action="store_true", help="end with 3 where nothing can be looked up")
    options = parser.parse_args()
    try:
        print(f"sbom: {write_sbom()} components in {SBOM.relative_to(ROOT)}")
        pins = advisories()
    except subprocess.CalledProcessError as error:
        print(f"audit: {error}", file=sys.stderr)
        pins = None
    if pins is None:
        print("audit: the advisory data can't be reached from here: NOTHING was audited", file=sys.stderr)
        return 3 if options.strict else 0
    concerned = [(pin, vulnerability) for pin in pins for vulnerability in pin["vulns"]]
    for pin, vulnerability in concerned:
        fixed = ", ".join(vulnerability["fix_versions"]) or "no release"
        print(f"audit: {pin['name']} {pin['version']}: {vulnerability['id']}, fixed in {fixed}")
    print(f"audit: {len(pins)} pins looked up, {len(concerned)} advisories")
    return 1 if concerned else 0


if __name__ == "__main__":
    sys.exit(main())
