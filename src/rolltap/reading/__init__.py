"""Reads the record: sessions, calls, tokens, groups, runs. See `rolltap.reading.reader`."""

from rolltap.reading.reader import RecordReader, folder_vocabulary, opened_reader, reader_on
from rolltap.reading.tokens import Vocabulary

__all__ = ["RecordReader", "Vocabulary", "folder_vocabulary", "opened_reader", "reader_on"]
