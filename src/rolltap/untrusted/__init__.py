"""Reads text that somebody else wrote, in processes that have limits and no keys."""

from rolltap.untrusted.readers import ReaderServer
from rolltap.untrusted.server import ReadLimits

__all__ = ["ReadLimits", "ReaderServer"]
