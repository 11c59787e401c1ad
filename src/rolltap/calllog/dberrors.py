"""Converts database drivers' errors to rolltap's store errors."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import exc

from rolltap.errors import RecordCorrupt, StoreError, StoreUnavailable

RETRY_AFTER_S = 1.0

_DAMAGED = ("malformed", "not a database", "file is encrypted", "invalid page", "could not read block")


@contextmanager
def store_errors(name: str) -> Iterator[None]:
    """Raises driver errors of the database `name` as a `StoreError` with a one-line message.

    Handles SQLAlchemy's errors, and SQLite's own for statements that bypass SQLAlchemy.
    """
    try:
        yield
    except (exc.IntegrityError, exc.DataError, sqlite3.IntegrityError, sqlite3.DataError) as error:
        raise RecordCorrupt(f"{name} refused a row: {_first_line(error)}") from error
    except (exc.DBAPIError, sqlite3.Error) as error:
        raise _store_error(name, _first_line(error)) from error
    except exc.TimeoutError as error:
        raise StoreUnavailable(f"{name}: all connections are in use", retry_after=RETRY_AFTER_S) from error
    except (OSError, TimeoutError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise StoreUnavailable(f"{name} can't be reached: {reason}", retry_after=RETRY_AFTER_S) from error


def _store_error(name: str, line: str) -> StoreError:
    if any(sign in line for sign in _DAMAGED):
        return RecordCorrupt(f"{name} is damaged: {line}; restore it from a backup")
    return StoreUnavailable(f"{name}: {line}", retry_after=RETRY_AFTER_S)


def _first_line(error: Exception) -> str:
    """The driver's message, without SQLAlchemy's statement and class names."""
    cause = error.orig if isinstance(error, exc.DBAPIError) else error
    lines = str(cause).splitlines() or [type(cause).__name__]
    return lines[0].removeprefix("<class ").split("'>: ")[-1]
