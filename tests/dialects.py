"""The dialects as a proxy opens them, for tests that need no proxy."""

from __future__ import annotations

from rolltap.protocols.cache_space import CacheSpace
from rolltap.protocols.dialects import open_dialects

SPACE = CacheSpace()
DIALECTS = open_dialects(SPACE)
