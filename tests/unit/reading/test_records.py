"""`rolltap.open`: the same record from a store and from a server, as rows, frames and cells of a notebook."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import numpy as np
import pytest
import pytest_asyncio

import rolltap
from rolltap.engine.scripted import say
from rolltap.engine.tiny import FOLDER
from rolltap.errors import ConfigError, DatasetError
from rolltap.reading.types import SessionPage, SessionQuery
from rolltap.record import AsyncRecord, Record

from ...harnesses.house import House, house
from .conftest import QUESTION, TURN, ReadHouse, Talk

PAGE = Path(__file__).parents[3] / "docs" / "python.md"
HOSTILE = "<script>alert(1)</script>"


def store_of(home: House) -> str:
    return home.app.settings.store_url


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def recorded(read_by_all: ReadHouse) -> ReadHouse:
    """Two sessions, the second with a break. Nobody adds to them but notes."""
    await (await read_by_all.talk(harness="codex")).two_turns()
    second = await read_by_all.talk(harness="claude")
    await second.ask({"role": "user", "content": f"Hello {HOSTILE}"}, tools=False)
    return read_by_all


@pytest.mark.parametrize(("limit", "found"), [(None, 3), (2, 2)])
async def test_a_session_that_moves_over_a_pages_border_is_one_row(
    limit: int | None, found: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("rolltap.record.PAGE", 2)
    ids = ["a", "b", "c"]

    class Growing:
        """A list, the newest first, to which a session is added after its first page."""

        async def settle(self, *, texts: bool) -> None: ...

        async def sessions(self, query: SessionQuery) -> SessionPage:
            page = sorted(ids, reverse=True)[query.offset : query.offset + query.limit]
            ids[3:] = ["d"]
            rows: Any = [SimpleNamespace(id=id) for id in page]
            return SessionPage(tuple(rows), len(ids), 1.0)

    source: Any = Growing()
    rows = [row.id async for row in AsyncRecord(source).sessions(limit=limit)]
    assert rows == ["c", "b", "a"][:found]


async def test_a_record_that_is_left_open_is_closed_at_exit(recorded: ReadHouse):
    script = f"""
import atexit, rolltap

def look():
    try:
        print(len(list(record.sessions())))
    except RuntimeError as error:
        print(error)

atexit.register(look)  # what is registered later runs before it
record = rolltap.open({store_of(recorded.home)!r})
look()
"""
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("2\nthe record is closed\n", "")


async def test_a_store_and_a_server_tell_the_same(recorded: ReadHouse):
    home = recorded.home
    admin = home.app.settings.keys.admin
    async with (
        rolltap.open_async(store_of(home), tokenizer=FOLDER) as store,
        rolltap.open_async(home.urls["admin"], key=admin) as server,
    ):
        sessions = await store.sessions().rows()
        assert sessions == await server.sessions().rows()
        assert [session.harness for session in sessions] == ["claude", "codex"]
        calls = await store.calls("harness=codex").rows()
        assert calls == await server.calls("harness=codex").rows()
        assert await store.tokens(calls[1].id) == await server.tokens(calls[1].id)
        assert await store.call(calls[1].id) == await server.call(calls[1].id)
        (mine,) = await store.trajectories("harness=codex and length>3").rows()
        (theirs,) = await server.trajectories("harness=codex and length>3").rows()
        assert np.array_equal(mine.token_ids, theirs.token_ids)
        assert np.array_equal(mine.loss_mask, theirs.loss_mask)
        assert mine.trained_tokens == sum(call.output_tokens for call in calls) == int(mine.loss_mask.sum())
        assert await server.trajectories("length>100000").rows() == []
        assert [row.harness for row in await server.sessions(search="zebra").rows()] == ["codex"]
        first = await server.sessions(sort="calls", limit=1).first()
        assert first is not None
        assert first.calls == 2
        with pytest.raises(DatasetError, match="no field 'colour'"):
            await store.sessions("colour=red").rows()


async def test_frames_have_the_rows_and_typed_columns(recorded: ReadHouse):
    async with rolltap.open_async(store_of(recorded.home)) as record:
        frame = await record.sessions().to_pandas()
        assert list(frame["calls"]) == [1, 2]
        arrow = await record.trajectories().to_arrow()
        assert (arrow.num_rows, str(arrow.schema.field("token_ids").type)) == (2, "list<item: int32>")
        empty = await record.sessions("harness=nobody").to_arrow()
        assert (empty.num_rows, str(empty.schema.field("reward").type)) == (0, "double")
        for kind, count in ((record.sessions(), 2), (record.trajectories(), 2), (record.calls(), 3)):
            assert (await kind.to_datasets()).num_rows == count
        tags = (await record.sessions().to_datasets())["tags"]  # datasets have no maps
        assert all(isinstance(json.loads(text), dict) for text in tags)
        rows = await record.calls().to_datasets()
        assert set(rows["outcome"]) == {"completed"}


async def test_notes_go_through_the_server_that_has_the_store(recorded: ReadHouse):
    home = recorded.home
    async with (
        rolltap.open_async(store_of(home)) as store,
        rolltap.open_async(home.urls["admin"], key=home.app.settings.keys.admin) as server,
    ):
        session = await server.sessions("harness=codex").first()
        assert session is not None
        with pytest.raises(ConfigError, match="through it"):
            await store.score(session.id, 1.0)
        note = await server.score(session.id, 1.0, "quality")
        assert (note.kind, note.value, note.author) == ("score", 1.0, "admin")
        assert (await store.session(session.id)).summary.scores == {"quality": 1.0}


async def test_a_session_shows_itself_and_runs_nothing(recorded: ReadHouse):
    async with rolltap.open_async(store_of(recorded.home)) as record:
        found = await record.sessions("harness=claude").first()
        assert found is not None
        html = (await record.session(found.id))._repr_html_()
        assert "&lt;script&gt;" in html
        assert "<script" not in html


async def test_the_blocking_twin_works_beside_a_running_loop(recorded: ReadHouse):
    def look(record: Record) -> None:
        with record:
            assert [session.harness for session in record.sessions()] == ["claude", "codex"]
            assert record.sessions().to_pandas(progress=True)["calls"].tolist() == [1, 2]
            assert "codex" in record.sessions()._repr_html_()
            assert record.session(next(iter(record.sessions())).id).calls
            with pytest.raises(ConfigError, match="trainer_url"):
                record.lease("tiny", trainer="me")
        with pytest.raises(RuntimeError, match="closed"):
            record.sessions().first()

    look(rolltap.open(store_of(recorded.home)))  # this test's own loop runs meanwhile


def test_what_cannot_be_opened_is_said(monkeypatch: pytest.MonkeyPatch):
    for name in ("ROLLTAP_ADMIN_KEY", "ROLLTAP_VIEWER_KEY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=r"nowhere\.db: no store there"):
        rolltap.open("nowhere.db")
    with pytest.raises(ConfigError, match="needs a key"):
        rolltap.open("http://127.0.0.1:1")


def test_import_rolltap_is_light():
    heavy = ["numpy", "sqlalchemy", "pydantic", "aiohttp", "msgspec", "pandas", "pyarrow"]
    code = f"import rolltap, sys; assert not [name for name in {heavy} if name in sys.modules]; rolltap.open"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


async def record_for_the_page(folder: Path) -> None:
    """A store at rolltap-data/rolltap.db with a rewarded rollout of a harness that is asked for zebras."""
    from rolltap.contract.admin import FinishRollout, NewReward
    from rolltap.harnesses.client import ClaimedRollout
    from rolltap.types import RolloutStatus, Task

    async with default_store(folder) as home, aiohttp.ClientSession() as http:
        group = await home.client.open_group(Task("t", "Look.", {"harness": "codex"}), policy="tiny", n=1)
        opened = await home.client.start_rollout(ClaimedRollout(group.rollout_ids[0]), ttl=60)
        await Talk(opened.session_id, opened.endpoint.key, home.urls["agent"], http).two_turns()
        await home.client.reward(NewReward(group.rollout_ids[0], 1.0))
        end = FinishRollout(RolloutStatus.SUCCEEDED, opened.attempt)
        await home.client.finish_rollout(group.rollout_ids[0], end)


async def record_sessions_of_one_call(folder: Path) -> None:
    """The store of a harness that was pointed at the proxy: sessions of one call, without rollouts and rewards."""
    async with default_store(folder) as home, aiohttp.ClientSession() as http:
        for _ in range(2):
            opened = await home.client.open_session(policy="tiny", tags={"harness": "codex"})
            await Talk(opened.session_id, opened.endpoint.key, home.urls["agent"], http).ask(QUESTION)


async def record_nothing(folder: Path) -> None:
    """The store of a server that was not called."""
    async with default_store(folder):
        pass


@asynccontextmanager
async def default_store(folder: Path) -> AsyncIterator[House]:
    """A rolltap whose store is at rolltap-data/rolltap.db of `folder` when it has stopped."""
    script = say(TURN, "The file stripes.txt holds a zebra.")
    async with house(script, folder / "house") as home:
        yield home
        store = Path(store_of(home).removeprefix("sqlite:///"))
    (folder / "rolltap-data").mkdir()
    shutil.copy(store, folder / "rolltap-data" / "rolltap.db")


@pytest.mark.parametrize("fill", [record_for_the_page, record_sessions_of_one_call, record_nothing])
def test_the_page_runs_as_it_stands(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fill: Callable[[Path], Coroutine[Any, Any, None]],
):
    asyncio.run(fill(tmp_path))
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    assert len([line for line in blocks[0].splitlines() if line.strip()]) <= 10
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), {})
    told = capsys.readouterr().out
    assert "codex" not in told
    assert ("{'quality': 0.75}" in told) == (fill is not record_nothing)
