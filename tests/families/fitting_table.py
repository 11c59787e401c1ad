"""What each template takes: the table of fitting.md here (`python -m tests.families.fitting_table` writes it)."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from rolltap.proxy.continuation.fit import Fitting, find_fitting
from rolltap.proxy.continuation.rendering import FamilyRenderer, TokenRenderer
from rolltap.proxy.continuation.template import TemplateRenderer
from rolltap.tokenizer import HubTokenizer

from .families import FAMILIES, TRAINING, Family
from .vocabularies import model_folder, prepare_harmony

PAGE = Path(__file__).with_name("fitting.md")
TABLE = re.compile(r"(?<=<!-- fitting:begin -->\n).*(?=\n<!-- fitting:end -->)", re.DOTALL)


@cache
def renderer_of(family: Family) -> TokenRenderer:
    """The family's renderer over the tiny vocabulary; Harmony's encoder needs its own."""
    if family.renderer == "gpt-oss":
        prepare_harmony()
    tokenizer = HubTokenizer(model_folder(family, "" if family.renderer == "gpt-oss" else "tiny"))
    return FamilyRenderer(family.renderer, tokenizer) if family.renderer else TemplateRenderer(tokenizer)


def table() -> str:
    """A row for each family. Families whose templates take the same share a row."""
    names: dict[Fitting, list[str]] = {}
    for family in FAMILIES.values():
        if TRAINING not in family.template:
            names.setdefault(find_fitting(renderer_of(family)), []).append(family.name)
    rows = [f"| {', '.join(members)} | {cells(fitting)} |" for fitting, members in names.items()]
    return "\n".join(["| families | rules | call ids | writes tools |", "|---|---|---|---|", *rows])


def cells(fitting: Fitting) -> str:
    """A row without its families."""
    rules = ", ".join(f"`{rule}`" for rule in fitting.rules) or "none: every shape fits"
    return f"{rules} | {fitting.id_form or 'any'} | {'yes' if fitting.shows_tools else '**no**'}"


def documented_rows() -> list[tuple[list[str], str]]:
    """The rows of the page: the families, and the other cells."""
    written = TABLE.search(PAGE.read_text(encoding="utf-8"))
    assert written is not None
    rows = [line.strip("| ").partition(" | ") for line in written[0].splitlines()[2:]]
    return [(names.split(", "), row) for names, _, row in rows]


if __name__ == "__main__":
    PAGE.write_text(TABLE.sub(lambda _: table(), PAGE.read_text(encoding="utf-8")), encoding="utf-8")
