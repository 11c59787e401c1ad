"""rolltap: point any agent at a URL; train on exactly the tokens it sampled.

The kernel of the product lives here (types, errors, settings, the call log, the ledger, the embedded engine, the
command line). The folders that stand at the top of the repository (`proxy`, `reconstructor`, `trainer_client`,
`harnesses`) are sub-packages of this one by symbolic link.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rolltap.record import AsyncRecord, Record, open, open_async

__version__ = "0.3.0"
__all__ = ["AsyncRecord", "Record", "__version__", "open", "open_async"]


def __getattr__(name: str) -> Any:
    """The record's Python interface, imported when it is first used: `import rolltap` alone loads nothing."""
    if name in __all__:
        from rolltap import record

        return getattr(record, name)
    raise AttributeError(f"module 'rolltap' has no attribute {name!r}")
