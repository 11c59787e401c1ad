"""Turns leased groups into tensors: `recorded`, `scoring`, `step` (a step's tables), `packing`, `collate`."""
