"""From leased groups to tensors: what is on record, what counts, a step's tables, rows in packs, packs as tensors."""
