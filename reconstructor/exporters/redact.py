"""Keeps secrets out of datasets.

Texts are redacted in place. Token ids can't be: a row whose tokens spell a secret is left out, and counted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

PATTERNS: Mapping[str, str] = {
    "rolltap key": r"\brt-[a-z]*-?[A-Za-z0-9_\-]{32,}",
    "OpenAI or Anthropic key": r"\bsk-[A-Za-z0-9_\-]{20,}",
    "Google key": r"\bAIza[A-Za-z0-9_\-]{35}",
    "GitHub token": r"\b(?:gh[pousr]_[A-Za-z0-9]{36,}|github_pat_[A-Za-z0-9_]{22,})",
    "GitLab token": r"\bglpat-[A-Za-z0-9_\-]{20,}",
    "Hugging Face token": r"\bhf_[A-Za-z0-9]{30,}",
    "AWS key id": r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b",
    "Slack token": r"\bxox[abeoprs]-[A-Za-z0-9\-]{10,}",
    "JSON web token": r"\beyJ[A-Za-z0-9_\-]{8,}\.eyJ[A-Za-z0-9_\-]{8,}\.[A-Za-z0-9_\-]+",
    "private key": r"-----BEGIN (?:[A-Z]+ )?PRIVATE KEY-----[\s\S]*?(?:-----END (?:[A-Z]+ )?PRIVATE KEY-----|$)",
    "bearer token": r"(?<=[Bb]earer )[A-Za-z0-9_\-.=+/]{20,}",
}
REPLACEMENT = "[redacted]"


class Redactor:
    """Finds the built-in patterns and the configured `secrets` (literal texts of at least 6 characters)."""

    def __init__(self, secrets: Sequence[str] = ()) -> None:
        literal = sorted((re.escape(secret) for secret in secrets if len(secret) >= 6), key=len, reverse=True)
        self._pattern = re.compile("|".join([*literal, *PATTERNS.values()]))
        self.redacted = 0

    def clean(self, value: Any) -> Any:
        """`value` with every secret in its texts replaced; what holds none is handed back as it is."""
        if isinstance(value, str):
            cleaned, count = self._pattern.subn(REPLACEMENT, value)
            self.redacted += count
            return cleaned if count else value
        if isinstance(value, Mapping):
            return {self.clean(key): self.clean(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.clean(item) for item in value]
        return value

    def finds(self, value: Any) -> bool:
        """Whether a text in `value` holds a secret."""
        if isinstance(value, str):
            return self._pattern.search(value) is not None
        if isinstance(value, Mapping):
            return any(self.finds(key) or self.finds(item) for key, item in value.items())
        if isinstance(value, (list, tuple)):
            return any(self.finds(item) for item in value)
        return False
