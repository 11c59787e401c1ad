"""What an index shows of a release, and that its version and addresses are the same everywhere."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest
import yaml

from rolltap import __version__, extras
from rolltap.extras import page

from .product import ROOT, sources

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_version_is_one_and_has_its_chapter() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert PROJECT["version"] == __version__
    assert re.search(rf"^## {re.escape(__version__)} - \d{{4}}-\d\d-\d\d$", changelog, re.MULTILINE)


def test_the_description_has_no_link_that_an_index_would_break() -> None:
    text = (ROOT / PROJECT["readme"]).read_text(encoding="utf-8")
    assert re.findall(r"\]\((?!https://)[^)]*\)", text) == []
    assert PROJECT["authors"] == [{"name": "rolltap developers"}]
    assert {"Repository", "Documentation", "Issues", "Changelog"} <= PROJECT["urls"].keys()


def test_addresses_are_those_of_the_project() -> None:
    home = PROJECT["urls"]["Repository"]
    assert all(url.startswith(home) for url in PROJECT["urls"].values())
    assert f"git clone {home} " in (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"repo_url: {home}\n" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def test_the_forge_runs_what_developers_run() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text(encoding="utf-8"))
    steps = workflow["jobs"]["test"]["steps"]
    assert {"run": "make test"} in steps
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step["uses"]) for step in steps if "uses" in step)


def test_no_message_names_a_page_that_an_installed_package_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Docstrings and comments are read in a checkout; what is printed may come from a wheel, so it asks `page`."""
    named = []
    for source in sources():
        texts = {id(each.value) for each in source.nodes if isinstance(each, ast.Expr)}  # docstrings
        named += [
            f"{source.name}:{each.lineno}"
            for each in source.nodes
            if isinstance(each, ast.Constant) and isinstance(each.value, str) and id(each) not in texts
            if re.search(r"\bdocs/[\w-]+\.md", each.value)
        ]
    assert named == []
    assert page("settings") == "docs/settings.md"
    monkeypatch.setattr(extras, "CHECKOUT", Path("/nowhere"))
    assert page("settings") == f"{PROJECT['urls']['Documentation']}/settings.md"
