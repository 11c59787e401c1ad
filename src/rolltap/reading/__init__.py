"""Reads the record: sessions, calls, tokens, groups, runs. See `rolltap.reading.reader`."""

from rolltap.reading.opening import folder_vocabulary, opened_reader, reader_on
from rolltap.reading.reader import RecordReader
from rolltap.reading.vocabulary import Vocabulary

__all__ = ["RecordReader", "Vocabulary", "folder_vocabulary", "opened_reader", "reader_on"]
