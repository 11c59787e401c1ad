"""Every setting stands in docs/settings.md as it is in the code."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_page_is_what_the_settings_say() -> None:
    made = runpy.run_path(str(ROOT / "scripts" / "settings_page.py"))
    assert (ROOT / "docs" / "settings.md").read_text(encoding="utf-8") == made["page"]()
