"""`rolltap view --tui`: the record in a terminal, for machines without a browser. It needs `rolltap[tui]`."""
