"""docs/glossary.md: every class it names is in the product, once per word."""

from __future__ import annotations

import re

from .product import ROOT, sources

ENTRY = re.compile(r"^\* \*\*(?P<word>[a-z][^*]*)\*\*: .+?(?: \(`(?P<name>\w+)`\))?$", re.MULTILINE)


def entries() -> list[tuple[str, str | None]]:
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    found = [(entry["word"], entry["name"]) for entry in ENTRY.finditer(text)]
    assert len(found) == len(re.findall(r"^\* ", text, re.MULTILINE)), "an entry is `* **word**: meaning (`Class`)`"
    return found


def test_every_class_of_the_glossary_is_in_the_product() -> None:
    classes = {node.name for source in sources() for node in source.classes()}
    named = {name for _, name in entries() if name}
    assert len(named) > 20
    assert named - classes == set()


def test_every_word_has_one_entry() -> None:
    words = [word for word, _ in entries()]
    assert len(words) == len(set(words))
