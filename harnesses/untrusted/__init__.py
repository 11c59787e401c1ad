"""Reads what an agent wrote: logs, databases, reports and folders, in processes that have limits and no keys."""

from rolltap.harnesses.untrusted.readers import read_untrusted

__all__ = ["read_untrusted"]
