"""A store's password is in nothing that is printed."""

from __future__ import annotations

import pytest

from rolltap.settings import hide_password


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://me:secret@host/db", "postgresql://me:***@host/db"),
        ("redis://:secret@host:6379/0", "redis://:***@host:6379/0"),
        ("postgresql+asyncpg://me:p@ss:word/@host/db", "postgresql+asyncpg://me:***@host/db"),
        ("postgresql://me@host/db?password=secret&x=1", "postgresql://me@host/db?password=***&x=1"),
        ("postgresql://me@host:5432/db", "postgresql://me@host:5432/db"),
        ("sqlite:////data/a@b:c.db", "sqlite:////data/a@b:c.db"),
        ("no url", "no url"),
    ],
)
def test_a_password_is_hidden_and_nothing_else(url: str, shown: str) -> None:
    assert hide_password(url) == shown
