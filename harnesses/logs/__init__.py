"""Readers of the logs that harnesses keep of their own runs; each is one file."""
