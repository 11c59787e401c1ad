"""What the docs point to is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .product import ROOT

PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/README.md"), *ROOT.glob("src/**/README.md")]
)
LINK = re.compile(r"\]\((?P<path>[^)#:]+)(?:#[^)]*)?\)")
FILE = re.compile(
    r"`(?P<path>(?:tests|proxy|src|harnesses|reconstructor|trainer_client|scripts|docs|deploy)/[\w/.-]+\.(?:py|md))`"
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_named_files_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    missing = {link["path"] for link in LINK.finditer(text) if not (page.parent / link["path"]).exists()}
    missing |= {file["path"] for file in FILE.finditer(text) if not (ROOT / file["path"]).exists()}
    assert missing == set()
