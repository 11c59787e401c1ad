"""The demo: an unmodified agent gets better at small file-system tasks, end to end on one machine."""
