"""Reads the record: sessions, calls, tokens, groups, runs. See `rolltap.reading.reader`."""
