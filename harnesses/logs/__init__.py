"""Readers of the logs that harnesses write of their own runs, one file each."""
