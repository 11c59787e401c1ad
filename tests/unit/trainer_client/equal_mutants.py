"""Changes that change nothing, each with its reason: (module, line, change)."""

from __future__ import annotations

EQUAL: dict[tuple[str, str, str], str] = {}
