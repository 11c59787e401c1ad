"""What the docs point to is there."""

from __future__ import annotations

import re
from pathlib import Path

from .product import ROOT

TOP = ("proxy", "reconstructor", "trainer_client", "harnesses")
DESCRIBED = (*TOP, "examples", "src/rolltap/calllog", "src/rolltap/ledger", "proxy/continuation")
"""Folders that must have a README: what is in them, the invariants, the limitations."""

PAGES = sorted(
    {
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("*/README.md"),
        *ROOT.glob("src/**/README.md"),
        *(page for folder in TOP for page in ROOT.glob(f"{folder}/*/README.md")),
    }
)
LINK = re.compile(r"\]\((?P<path>[^)#:]+)(?:#[^)]*)?\)")
FILE = re.compile(
    r"`(?P<path>(?:tests|proxy|src|harnesses|reconstructor|trainer_client|scripts|docs|deploy)/[\w/.-]+\.(?:py|md))`"
)

CODE = ("src/rolltap", "proxy", "reconstructor", "harnesses", "trainer_client")
SPLIT = re.compile(r'"\s*\n\s*f?"')
"""Where a long message goes on in the next line."""


def missing_from(page: Path) -> set[str]:
    """The links and named files of a page that lead nowhere."""
    text = page.read_text(encoding="utf-8")
    missing = {link["path"] for link in LINK.finditer(text) if not (page.parent / link["path"]).exists()}
    return missing | {file["path"] for file in FILE.finditer(text) if not (ROOT / file["path"]).exists()}


def test_links_and_named_files_exist() -> None:
    assert len(PAGES) > 50
    assert {str(page.relative_to(ROOT)): missing for page in PAGES if (missing := missing_from(page))} == {}


def test_one_of_each_is_added_where_the_table_says() -> None:
    """The file that is named as a registry reads the entry points that are named beside it."""
    table = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Add one of each")[2]
    rows = re.findall(r"^\| [^|]+ \| ([^|]+) \| ([^|]+) \| `(rolltap\.\w+)` \|", table, re.MULTILINE)
    assert len(rows) > 10
    for model, registry, entry_points in rows:
        path = re.search(r"`([\w/.]+\.py)`", model if registry == "there" else registry)
        assert path is not None, registry
        assert f'"{entry_points}"' in (ROOT / path[1]).read_text(encoding="utf-8"), path[1]


def test_every_part_has_a_readme() -> None:
    for folder in DESCRIBED:
        assert (ROOT / folder / "README.md").read_text(encoding="utf-8").startswith("# "), folder


def test_troubleshooting_quotes_what_is_printed() -> None:
    """In the column of symptoms: messages as they stand in the code, names of the record's own words, commands."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    symptoms = [
        line.split("|")[1] for line in page.splitlines() if line.startswith("| ") and "what you see" not in line
    ]
    assert len(symptoms) > 15
    texts = (path.read_text(encoding="utf-8") for folder in CODE for path in (ROOT / folder).rglob("*.py"))
    code = "\n".join(SPLIT.sub("", text) for text in texts)
    quotes = {quote for symptom in symptoms for quote in re.findall("`([^`]+)`", symptom)}
    assert {quote for quote in quotes if quote.removeprefix("rolltap ") not in code} == set()
