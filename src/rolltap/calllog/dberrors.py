"""Turns what drivers raise into rolltap's store errors, at the one place where databases are spoken to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import exc

from rolltap.errors import RecordCorrupt, StoreError, StoreUnavailable

RETRY_AFTER_S = 1.0

_DAMAGED = ("malformed", "not a database", "file is encrypted", "invalid page", "could not read block")


@contextmanager
def store_errors(name: str) -> Iterator[None]:
    """Within it, a driver's error on the database `name` is raised as a `StoreError` of one line."""
    try:
        yield
    except (exc.IntegrityError, exc.DataError) as error:
        raise RecordCorrupt(f"{name}: a row is refused: {_first_line(error)}") from error
    except exc.DBAPIError as error:
        raise failure(name, _first_line(error)) from error
    except exc.TimeoutError as error:
        raise StoreUnavailable(f"{name}: all connections are in use", retry_after=RETRY_AFTER_S) from error
    except (OSError, TimeoutError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise StoreUnavailable(f"{name} can't be reached: {reason}", retry_after=RETRY_AFTER_S) from error


def failure(name: str, line: str) -> StoreError:
    """What a driver's error means that is not about a row."""
    if any(sign in line for sign in _DAMAGED):
        return RecordCorrupt(f"{name} is damaged: {line}; restore it from a backup")
    return StoreUnavailable(f"{name}: {line}", retry_after=RETRY_AFTER_S)


def _first_line(error: exc.DBAPIError) -> str:
    """The driver's own words, without SQLAlchemy's statement and the class names in front."""
    lines = str(error.orig).splitlines() or [type(error.orig).__name__]
    return lines[0].removeprefix("<class ").split("'>: ")[-1]
