"""The record from Python: `rolltap.open(...)` for scripts and notebooks, `rolltap.open_async(...)` for asyncio.

record = rolltap.open()  # the store of `rolltap serve` here; also a file, a folder or a URL
frame = record.sessions(where="harness=codex and reward>=0.5").to_pandas()
"""

from rolltap.records.opening import open, open_async
from rolltap.records.record import AsyncRecord, Record
from rolltap.records.tables import AsyncTable, Table

__all__ = ["AsyncRecord", "AsyncTable", "Record", "Table", "open", "open_async"]
