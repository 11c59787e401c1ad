"""The main job, end to end, on one machine: an unmodified agent gets better at small file-system tasks."""
