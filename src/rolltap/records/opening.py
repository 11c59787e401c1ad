"""Opens a record: a store by its URL or file, or a running server by the URL of its admin plane."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from rolltap.errors import ConfigError
from rolltap.http_client import AsyncHttpClient
from rolltap.reading import folder_vocabulary, opened_reader
from rolltap.records.loop import LoopThread
from rolltap.records.record import AsyncRecord, Record, TrainerPlane
from rolltap.records.source import RecordSource, ServerSource
from rolltap.settings import store_url


def open(
    where: str | os.PathLike[str] | None = None,
    *,
    key: str | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    trainer_url: str | None = None,
    trainer_key: str | None = None,
) -> Record:
    """The record at `where`, for callers that block.

    `where` is a store (a SQLite file, its folder, `postgresql://...`) or the URL of a server's admin plane;
    without it, the store that `rolltap serve` would use here. `key` is an admin's or viewer's (default
    ROLLTAP_ADMIN_KEY, then ROLLTAP_VIEWER_KEY). `tokenizer` is a model folder, for the text of a store's
    tokens; a server has its own.
    """
    loop = LoopThread()
    trainer = _trainer(trainer_url, trainer_key)
    try:
        source = loop.run(loop.stack.enter_async_context(opened_source(where, key, tokenizer)))
    except BaseException:
        loop.close()
        raise
    return Record(AsyncRecord(source, trainer), loop, trainer)


@asynccontextmanager
async def open_async(
    where: str | os.PathLike[str] | None = None,
    *,
    key: str | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    trainer_url: str | None = None,
    trainer_key: str | None = None,
) -> AsyncIterator[AsyncRecord]:
    """As `open`, for asyncio: `async with rolltap.open_async(...) as record`."""
    async with opened_source(where, key, tokenizer) as source:
        yield AsyncRecord(source, _trainer(trainer_url, trainer_key))


@asynccontextmanager
async def opened_source(
    where: str | os.PathLike[str] | None, key: str | None, tokenizer: str | os.PathLike[str] | None
) -> AsyncIterator[RecordSource]:
    url = _url(where)
    if url.startswith(("http://", "https://")):
        key = key or os.environ.get("ROLLTAP_ADMIN_KEY") or os.environ.get("ROLLTAP_VIEWER_KEY")
        if not key:
            raise ConfigError(f"{url} needs a key: rolltap.open(URL, key=...), or set ROLLTAP_VIEWER_KEY")
        async with AsyncHttpClient(url, key, timeout=300.0) as client:
            yield ServerSource(client)
        return
    vocabulary = folder_vocabulary(Path(tokenizer)) if tokenizer is not None else None
    async with opened_reader(url, vocabulary=lambda policy: vocabulary) as reader:
        yield reader


def _url(where: str | os.PathLike[str] | None) -> str:
    if where is None:
        from rolltap.settings import load_settings

        default = Path("rolltap.toml")
        return load_settings(default if default.exists() else None).store_url
    return store_url(where)


def _trainer(url: str | None, key: str | None) -> TrainerPlane | None:
    url, key = url or os.environ.get("ROLLTAP_TRAINER_URL"), key or os.environ.get("ROLLTAP_TRAINER_KEY")
    return TrainerPlane(url, key) if url and key else None
