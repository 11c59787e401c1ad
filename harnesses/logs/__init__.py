"""Harnesses' own logs of their runs: readers of their formats, and the comparison with the record."""
