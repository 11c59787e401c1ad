"""An agent in the folder where `rolltap serve` runs sees neither its keys nor its record."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from rolltap.errors import RuntimeFailed, TaskInvalid
from rolltap.harnesses.agents.environments import own_folder
from rolltap.harnesses.base import Command, Limits
from rolltap.harnesses.runtimes.bubblewrap import BubblewrapRuntime
from rolltap.harnesses.runtimes.here import CurrentFolderRuntime
from rolltap.harnesses.runtimes.shown import private_paths
from rolltap.harnesses.runtimes.sources import Empty, Folder

SECRETS = {
    "rolltap-data/keys.toml": 'admin = "SECRET"\nsecret = "SECRET"\n',
    "rolltap-data/spool": "SECRET",
    "sub/other-data/keys.toml": 'trainer = "SECRET"\n',
    "rolltap.toml": '[engines.main]\napi_key = "SECRET"\n',
    "production.toml": '[listen]\nhost = "::1"\n[engines.main]\napi_key = "SECRET"\n',
    "sub/rolltap.toml": '[keys]\nadmin = "SECRET"\n',
}
OWN = {
    "main.py": "print()\n",
    "pyproject.toml": "[project]\n",
    "keys.toml": 'piano = "not ours"\n',
    "app.db.lock": "",
    "sub/notes.md": "mine\n",
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    for name, text in (SECRETS | OWN).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    with closing(sqlite3.connect(folder / "record.db")) as store, store:
        store.execute("CREATE TABLE calls (prompt TEXT)")
        store.execute("INSERT INTO calls VALUES ('SECRET')")
    store.close()
    (folder / "record.db.lock").touch()
    return folder


def test_data_settings_and_stores_are_found(project: Path) -> None:
    paths = {str(path) for path in private_paths(project)}
    assert paths == {
        "rolltap-data",
        "sub/other-data",
        "rolltap.toml",
        "production.toml",
        "sub/rolltap.toml",
        "record.db",
        "record.db.lock",
    }


async def test_a_sandbox_in_the_servers_folder_hides_them(project: Path) -> None:
    workspace = await CurrentFolderRuntime(project, sandbox=BubblewrapRuntime()).prepare(Empty())
    try:
        attack = "grep -rs SECRET . && exit 1; rm -rf rolltap-data rolltap.toml; touch rolltap-data/x; cat sub/notes.md"
        result = await workspace.run(Command(("/bin/sh", "-c", attack)), Limits(), 30)
    finally:
        await workspace.close()
    assert (result.code, "mine" in result.output, "SECRET" in result.output) == (0, True, False)
    assert all((project / name).read_text() == text for name, text in (SECRETS | OWN).items())


def test_a_copy_of_a_folder_is_without_them(project: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    Folder(project)(copy)
    files = [path for path in copy.rglob("*") if path.is_file()]
    assert {str(path.relative_to(copy)) for path in files} == set(OWN)
    assert not any(b"SECRET" in path.read_bytes() for path in files)


def test_the_data_folder_itself_is_no_place_for_an_agent(project: Path) -> None:
    with pytest.raises(RuntimeFailed, match="data folder"):
        private_paths(project / "rolltap-data")
    (project / "game.py").touch()
    with pytest.raises(TaskInvalid, match="folder of its own"):
        own_folder(str(project / "game.py"))
