"""A store as people name it (a file, its folder, a URL) as the URL that opens it."""

from __future__ import annotations

import os
import re
from pathlib import Path

from rolltap.errors import ConfigError

DATABASE = "rolltap.db"
DATA = "rolltap-data"
STORE_HELP = "a rolltap.db, its folder, or postgresql://...; default the settings' store"

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.]+:")


def store_url(named: str | os.PathLike[str], *, may_be_new: bool = False) -> str:
    """The URL of the store `named`: itself, or that of a SQLite file, given by its path or a folder that holds it.

    With `may_be_new` a file that is not there is one to be made. `ConfigError` says what was looked for.
    """
    text = os.fspath(named)
    if _URL.match(text):
        return text
    path = Path(text)
    looked_for = [path / DATABASE, path / DATA / DATABASE] if path.is_dir() else [path]
    found = next((each for each in looked_for if each.is_file()), looked_for[0] if may_be_new else None)
    if found is None:
        where = " and ".join(map(str, looked_for))
        raise ConfigError(f"{text}: no store there; looked for {where}; a store is a {DATABASE}, its folder or a URL")
    return f"sqlite:///{found.absolute()}"
