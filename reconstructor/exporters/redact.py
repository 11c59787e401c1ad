"""Keeps secrets out of datasets.

Texts are redacted in place, and counted by kind. Token ids can't be: a row whose tokens spell a secret is left out.
What they spell is what their calls said; with the tokenizer at hand the ids themselves are decoded as well.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rolltap.errors import DatasetError

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


CONFIGURED = "configured secret"
UNSUITABLE = ("Public IP (ipv4)",)
"""What detect-secrets looks for beside secrets."""

KindPattern = tuple[str, re.Pattern[str]]


class Redactor:
    """Finds the built-in patterns, the configured `secrets` (literal texts of at least 6 characters), and `more`.

    `replaced` counts by kind what was.
    """

    def __init__(self, secrets: Sequence[str] = (), more: Sequence[KindPattern] = ()) -> None:
        literal = sorted((re.escape(secret) for secret in secrets if len(secret) >= 6), key=len, reverse=True)
        kinds = ({CONFIGURED: "|".join(literal)} if literal else {}) | dict(PATTERNS)
        self._kinds = list(kinds)
        own = re.compile("|".join(f"(?P<k{at}>{pattern})" for at, pattern in enumerate(kinds.values())))
        self._patterns: list[tuple[str | None, re.Pattern[str]]] = [(None, own), *more]
        self.replaced: Counter[str] = Counter()

    @property
    def redacted(self) -> int:
        return self.replaced.total()

    def clean(self, value: Any) -> Any:
        """`value` with every secret in its texts replaced; what holds none is handed back as it is."""
        if isinstance(value, str):
            for kind, pattern in self._patterns:
                value = pattern.sub(lambda match, kind=kind: self._replace(match, kind), value)
            return value
        if isinstance(value, Mapping):
            return {self.clean(key): self.clean(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.clean(item) for item in value]
        return value

    def _replace(self, match: re.Match[str], kind: str | None) -> str:
        if not match[0]:
            return ""
        self.replaced[kind or self._kinds[int((match.lastgroup or "k0")[1:])]] += 1
        return REPLACEMENT

    def finds(self, value: Any) -> bool:
        """Whether a text in `value` holds a secret."""
        if isinstance(value, str):
            return any(pattern.search(value) for _, pattern in self._patterns)
        if isinstance(value, Mapping):
            return any(self.finds(key) or self.finds(item) for key, item in value.items())
        if isinstance(value, (list, tuple)):
            return any(self.finds(item) for item in value)
        return False


def library_patterns() -> list[KindPattern]:
    """What detect-secrets knows by shape, by its kind."""
    try:
        from detect_secrets.core.plugins.util import get_mapping_from_secret_type_to_class
        from detect_secrets.plugins.base import RegexBasedDetector
    except ImportError as error:
        raise DatasetError('--detect-secrets needs its package: pip install "rolltap[export]"') from error
    found: list[KindPattern] = []
    for kind, detector in sorted(get_mapping_from_secret_type_to_class().items()):
        if issubclass(detector, RegexBasedDetector) and kind not in UNSUITABLE:
            found += [(kind, pattern) for pattern in detector().denylist]
    return found


def token_arrays(value: Any) -> Iterator[list[int]]:
    """The token ids in a row: every run of integers under a key that ends with `ids`."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _ids_in(item) if str(key).endswith("ids") else token_arrays(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from token_arrays(item)


def _ids_in(value: Any) -> Iterator[list[int]]:
    if isinstance(value, np.ndarray):
        yield value.tolist()
    elif isinstance(value, (list, tuple)) and value and isinstance(value[0], int):
        yield list(value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _ids_in(item)
