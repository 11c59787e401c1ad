"""Opens readers on a store, beside the server that writes it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from rolltap.calllog.database import Database
from rolltap.calllog.open import LogWithDatabase, open_call_log
from rolltap.errors import ConfigError
from rolltap.reading.index import SessionIndex
from rolltap.reading.indexing import Indexer
from rolltap.reading.reader import RecordReader, RulesOf, VocabularyOf
from rolltap.reading.vocabulary import Vocabulary
from rolltap.reconstructor.rules import session_rules
from rolltap.tenants import DEFAULT_TENANT, current_tenant


def index_path(database: Database, folder: Path | None = None) -> Path:
    """Returns the path of a store's index for this tenant: beside a SQLite file, else in `folder`, or without one in
    the user's cache."""
    if database.dialect_name == "sqlite" and database.url.database:
        database_file = Path(database.url.database).absolute()
        if os.access(database_file.parent, os.W_OK):
            return database_file.with_name(f"{database_file.name}.index")
    tenant = current_tenant()
    identity = database.name if tenant == DEFAULT_TENANT else f"{database.name}\0{tenant}"
    name = hashlib.sha256(identity.encode()).hexdigest()[:16]
    if folder is not None:
        return folder / f"{name}.index"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "rolltap" / f"{name}.index"


def reader_on(
    log: LogWithDatabase,
    *,
    rules: RulesOf | None = None,
    vocabulary: VocabularyOf | None = None,
    indexes: Path | None = None,
) -> RecordReader:
    """Returns a reader on a started log. `indexes` is the folder of a Postgres store's index."""
    indexer = Indexer(SessionIndex(index_path(log.database, indexes)), log.database)
    return RecordReader(
        log,
        indexer,
        rules=rules or session_rules,
        vocabulary=vocabulary or (lambda policy: None),
    )


class Readers:
    """One reader per tenant that asks, each with its own index."""

    def __init__(self, log: LogWithDatabase, make: Callable[[], RecordReader]) -> None:
        self.log = log
        self._make = make
        self._of_tenant: dict[str, RecordReader] = {}

    def own(self) -> RecordReader:
        """Returns the reader of this task's tenant."""
        tenant = current_tenant()
        if tenant not in self._of_tenant:
            self._of_tenant[tenant] = self._make()
        return self._of_tenant[tenant]

    async def close(self) -> None:
        for reader in self._of_tenant.values():
            await reader.close()


@asynccontextmanager
async def opened_reader(
    store: str, *, rules: RulesOf | None = None, vocabulary: VocabularyOf | None = None
) -> AsyncIterator[RecordReader]:
    """Opens the record at `sqlite:///PATH` or `postgresql://...` for reading, for this task's tenant."""
    async with opened_readers(store, rules=rules, vocabulary=vocabulary) as readers:
        yield readers.own()


@asynccontextmanager
async def opened_readers(
    store: str,
    *,
    rules: RulesOf | None = None,
    vocabulary: VocabularyOf | None = None,
    connections: int = 20,
    indexes: Path | None = None,
) -> AsyncIterator[Readers]:
    """Opens the record once for reading, for all tenants. Raises `ConfigError` if the store holds no record."""
    log = open_call_log(store, writable=False, connections=connections)
    if not isinstance(log, LogWithDatabase):
        raise ConfigError(f"{store} holds no record to read; expected sqlite:///PATH or postgresql://...")
    await log.start()
    try:
        readers = Readers(log, lambda: reader_on(log, rules=rules, vocabulary=vocabulary, indexes=indexes))
        try:
            yield readers
        finally:
            await readers.close()
    finally:
        await log.close()


def folder_vocabulary(folder: Path) -> Vocabulary:
    """Returns the tokenizer of a model folder. Raises `ConfigError` if it can't be read or the packages are missing."""
    from rolltap.tokenizer import HubTokenizer

    return Vocabulary(HubTokenizer(folder).decode)
