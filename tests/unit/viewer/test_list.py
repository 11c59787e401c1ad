"""The lists say what sessions and groups are about, count what they share, and change with the record alone."""

from __future__ import annotations

import asyncio
import re
import time
from html import unescape
from pathlib import Path
from urllib.parse import parse_qs, quote, urlsplit

import pytest

from rolltap.contract.admin import FinishRollout, NewReward
from rolltap.harnesses.client import ClaimedRollout
from rolltap.ledger.views import GroupQuery
from rolltap.proxy.viewer.listing import ListAddress, address_of
from rolltap.proxy.viewer.pages import QUIET_S, Pages
from rolltap.reading.index import condition
from rolltap.reading.reader import opened_reader
from rolltap.reading.runs import default_ranges
from rolltap.reading.types import SessionPage, VersionRange
from rolltap.types import RolloutStatus, Task

from ..reading.conftest import QUESTION, SYSTEM, Talk
from .conftest import HOSTILE, Viewed

MEASURES = "purpose=eval"


@pytest.fixture
def viewed(viewed_by_all: Viewed) -> Viewed:
    return viewed_by_all


async def played(viewed: Viewed, task: Task, *rewards: float, tags: tuple[str, ...] = ()) -> list[str]:
    """The sessions of a group with these rewards."""
    home = viewed.reading.home
    group = await home.client.open_group(task, policy="tiny", n=len(rewards), tags=tags)
    sessions = []
    for reward, rollout_id in zip(rewards, group.rollout_ids, strict=True):
        opened = await home.client.start_rollout(ClaimedRollout(rollout_id, ""), ttl=60)
        await Talk(opened.session_id, opened.endpoint.key, home.urls["agent"], viewed.reading.http).two_turns()
        await home.client.reward(NewReward(rollout_id, reward))
        await home.client.finish_rollout(rollout_id, FinishRollout(RolloutStatus.SUCCEEDED, attempt=1))
        sessions.append(opened.session_id)
    return sessions


async def get_until(viewed: Viewed, path: str, *texts: str) -> str:
    """The page once it holds the texts: the reading process looks for changes twice a second."""
    for _ in range(100):
        page = await viewed.get(path)
        if all(text in page for text in texts):
            return page
        await asyncio.sleep(0.1)
    raise AssertionError(f"{path} never showed {texts}")


def row_of(page: str, session_id: str) -> str:
    """A session's row of the list."""
    found = re.search(rf'<tr data-href="/view/sessions/{session_id}">.*?</tr>', page, re.DOTALL)
    assert found is not None, "the session is not listed"
    return found[0]


async def test_a_row_says_what_the_session_is_about_and_how_it_went(viewed: Viewed):
    (session_id,) = await played(viewed, Task("zebra-hunt", "Find it."), 0.75)
    row = row_of(await get_until(viewed, "/", session_id), session_id)
    assert QUESTION["content"] in row
    assert SYSTEM["content"] not in row
    assert "zebra-hunt" in row
    assert 'class="good" width="48.0"' in row, "three quarters of the bar"
    assert " ago</time>" in row or ">now</time>" in row
    about, reward, started = (row.index(part) for part in (QUESTION["content"], 'class="bars"', "<time"))
    assert about < reward < started, "the first columns, which a phone shows"
    empty = await viewed.reading.talk()
    assert ">no call yet<" in row_of(await get_until(viewed, "/", empty.session_id), empty.session_id)
    await viewed.reading.home.client.close_session(empty.session_id)
    assert ">no call<" in row_of(await get_until(viewed, "/", ">no call<"), empty.session_id)


async def test_evaluations_are_told_from_training(viewed: Viewed):
    task = Task("held-out-1", "Measure.")
    (trained,) = await played(viewed, task, 1.0)
    (measured,) = await played(viewed, task, 0.0, tags=(MEASURES,))
    for purpose, shown, hidden in (("training", trained, measured), ("evaluation", measured, trained)):
        page = await get_until(viewed, f"/?where=purpose%3D{purpose}", shown)
        assert hidden not in page
        groups = await viewed.get(f"/groups?purpose={purpose}&words=held-out")
        assert groups.count("<tr data-href") == 1
        assert ('class="chip">evaluation<' in groups) is (purpose == "evaluation")
        assert (">measured</span>" in groups, ">dropped</span>" in groups) == (purpose == "evaluation", False), (
            "its state"
        )
        assert ">Measure.</a>" in groups, "a group says what it is about, too"
    assert (await viewed.get("/groups?words=measure.")).count("<tr data-href") == 2, "the instruction is searched, too"
    assert "No group matches" in await viewed.get("/groups?words=nothing-like-it")


async def test_facets_count_what_the_sessions_share_and_are_links(viewed: Viewed):
    for _ in range(2):
        await (
            await viewed.reading.talk(harness="facet-test", team="a and b", once=HOSTILE.replace("\x1b", ""))
        ).two_turns()
    await (await viewed.reading.talk(harness="facet-test", team="other")).two_turns()
    facets = await get_until(viewed, "/facets?where=harness%3Dfacet-test", '>facet-test</span><span class="n">3<')
    values = dict(re.findall(r'<span class="what">([^<]*)</span><span class="n">(\d+)', unescape(facets)))
    assert values["facet-test"] == "3"
    assert values["team=a and b"] == "2"
    assert "team=other" not in values, "one session alone has it"
    links = {
        unescape(text): unescape(href)
        for href, text in re.findall(r'href="([^"]+)"[^>]*><span class="what">([^<]*)<', facets)
    }
    narrowed = await viewed.get(links["team=a and b"].removeprefix("/view"))
    assert narrowed.count("<tr data-href") == 2
    assert "facet-test" not in parse_qs(urlsplit(links["facet-test"]).query).get("where", [""])[0], "takes itself away"
    assert re.search(r'aria-current="true"[^>]*><span class="what">facet-test', facets)
    assert "<script>window" not in facets


async def test_headers_sort_both_ways(viewed: Viewed):
    low, high = await played(viewed, Task("sorted", "Sort."), -1.0, 2.0)
    page = await viewed.get("/")
    down = unescape(re.search(r'href="([^"]*sort=reward[^"]*)"', page)[1])  # type: ignore[index]
    first = await get_until(viewed, f"{down.removeprefix('/view')}&where=task%3Dsorted", low, high)
    assert first.index(high) < first.index(low)
    assert 'aria-sort="descending"' in first
    up = unescape(re.search(r'href="([^"]*sort=reward[^"]*order=asc[^"]*)"', first)[1])  # type: ignore[index]
    second = await viewed.get(up.removeprefix("/view"))
    assert second.index(low) < second.index(high)
    assert 'aria-sort="ascending"' in second


async def test_what_is_selected_is_downloaded(viewed: Viewed):
    first, second = await played(viewed, Task("picked", "Pick."), 0.0, 1.0)
    assert await viewed.get(f"/selection/sessions.txt?picked={second}") == f"{second}\n"
    async with viewed.browser.get(
        f"{viewed.admin}/view/selection/dataset.zip?picked={first}&picked={second}"
    ) as response:
        assert response.status == 200
        assert response.headers["content-type"] == "application/zip"
    page = await get_until(viewed, "/?where=task%3Dpicked", first, second)
    assert page.count('name="picked"') == 2


async def test_a_page_is_sent_again_only_if_something_has_changed(viewed: Viewed):
    (session_id,) = await played(viewed, Task("news", "News."), 1.0)
    group_id = (await viewed.reading.reader.summaries([session_id]))[session_id].group_id
    for path in ("/", "/?q=zebra", "/groups", f"/groups/{group_id}", "/runs", "/runs/tiny"):
        page = await viewed.get(path)
        for _ in range(20):  # until the index has read what the tests before have left
            state = re.search(r'<meta name="state" content="(\w+)">', page)
            assert state is not None, f"{path} follows the record"
            async with viewed.browser.get(
                f"{viewed.admin}/view{path}", headers={"If-None-Match": state[1]}
            ) as response:
                if response.status == 304:
                    assert await response.read() == b""
                    break
                page = await response.text()
        else:
            pytest.fail(f"{path} is always new")
        await (await viewed.reading.talk()).two_turns()
        for _ in range(100):
            async with viewed.browser.get(
                f"{viewed.admin}/view{path}", headers={"If-None-Match": state[1]}
            ) as response:
                if response.status == 200:
                    assert response.headers["content-encoding"] == "gzip"
                    break
            await asyncio.sleep(0.1)
        else:
            pytest.fail(f"{path} is never new")


async def test_a_store_by_itself_is_not_asked_for_news_when_none_can_come(
    viewed: Viewed, monkeypatch: pytest.MonkeyPatch
):
    await (await viewed.reading.talk()).two_turns()
    reader = viewed.reading.reader
    await reader.settle()
    pages = Pages(reader, "", standalone=True)
    assert await pages.state() != "", "something happened just now"
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + QUIET_S + 60)
    assert await pages.state() == ""
    assert 'name="state"' not in await pages.groups(GroupQuery())
    assert await Pages(reader, "").state() != "", "a server may always get more"


async def test_a_runs_page_is_new_when_its_trainer_has_made_a_step(viewed: Viewed, tmp_path: Path):
    steps = tmp_path / "metrics.jsonl"
    async with opened_reader(viewed.reading.home.app.settings.store_url, metrics={"tiny": steps}) as reader:
        await reader.settle()
        pages = Pages(reader, "")
        before = await pages.run_state("tiny", [])
        assert await pages.run_state("tiny", []) == before
        steps.write_text("{}")
        assert await pages.run_state("tiny", []) != before


async def test_a_search_that_is_not_complete_says_so(viewed: Viewed, monkeypatch: pytest.MonkeyPatch):
    async def partly(query: object) -> SessionPage:
        return SessionPage((), 0, 0.209)

    await (await viewed.reading.talk()).two_turns()
    async with opened_reader(viewed.reading.home.app.settings.store_url) as reader:
        monkeypatch.setattr(reader, "sessions", partly)
        for address, words in (
            (ListAddress("zebra"), "This search is not complete yet: 20 %"),
            (ListAddress(), "This list is not"),
        ):
            page = await Pages(reader, "").sessions(address)
            assert words in page
            assert "Export all that match" in page
            assert "selection of 0" not in page
        assert "No session matches so far" in await Pages(reader, "").sessions(ListAddress("zebra"))
        assert 'name="state"' in await Pages(reader, "", standalone=True).sessions(ListAddress()), (
            "it goes on by itself"
        )


async def test_errors_are_pages_that_lead_on(viewed: Viewed):
    for path, status in (("/sessions/01x", 404), ("/groups/01x", 404), ("/nothing", 404), ("/?offset=x", 422)):
        page = await viewed.get(path, status)
        assert '<nav aria-label="Pages">' in page, path
        assert 'href="/view/groups"' in page
    page = await viewed.get("/?where=rewrad%3E1")
    assert "no field &#39;rewrad&#39;" in page
    assert "did you mean" in page
    assert "Export this selection" not in page
    assert "Take out a word" not in page


async def test_two_sessions_are_compared_line_by_line(viewed: Viewed):
    first, second = await viewed.reading.talk(), await viewed.reading.talk()
    await first.two_turns()
    history = [SYSTEM, QUESTION, await second.ask(SYSTEM, QUESTION)]
    result = {"role": "tool", "tool_call_id": history[-1]["tool_calls"][0]["id"], "content": f"one\n{HOSTILE}\nlast"}
    await second.ask(*history, result)
    page = await viewed.get(f"/diff?first={first.session_id}&second={second.session_id}")
    assert "call 1 is the same" in page
    assert "1 call of 2 differs" in page
    removed = re.search(r'<span class="first"><i class="sign">−</i>([^<]*)', page)
    assert removed is not None
    assert removed[1].strip() == "stripes.txt"
    assert "&lt;script&gt;window" in page
    assert "<script>window" not in page
    assert "no session" in await viewed.get(f"/diff?first={first.session_id}&second=nope", 404)


@pytest.mark.parametrize(
    ("where", "condition", "left"),
    [
        ("harness=codex and reward>=0.5", "harness=codex", "reward>=0.5"),
        ("harness = codex", "harness=codex", ""),
        ('tag.team="a and b" and calls>=2', 'tag.team="a and b"', "calls>=2"),
        ("reward>0 and reward<=0.5", "reward>0 and reward<=0.5", ""),
    ],
)
def test_a_condition_is_added_and_taken_away(where: str, condition: str, left: str):
    address = ListAddress(where=where, offset=50)
    assert address.has(condition)
    taken = parse_qs(urlsplit(address.toggled(condition)).query)
    assert taken.get("where", [""])[0] == left
    assert "offset" not in taken, "it begins at the first page"
    added = ListAddress(where=left).toggled(condition)
    assert ListAddress(where=parse_qs(urlsplit(added).query)["where"][0]).has(condition)


def test_an_address_holds_all_that_the_list_shows():
    address = ListAddress('a "b"&c', "harness=codex and reward>=0.5", "reward", ascending=True, offset=100)
    query = {name: values[0] for name, values in parse_qs(urlsplit(address.href).query).items()}
    assert address_of(query["q"], query["where"], query["sort"], query["order"], int(query["offset"])) == address
    assert address_of("", "", "nothing", "", -5) == ListAddress()
    assert ListAddress().href == "/view/"


@pytest.mark.parametrize("value", ["codex", "a and b", "it's", "né", "1=2"])
def test_a_facets_condition_is_read_as_it_was_meant(value: str):
    written = condition("harness", value)
    assert written is not None
    address = ListAddress(where=f"{written} and calls>=1")
    assert len(address.conditions()) == 2
    assert address.has(written)
    assert quote(value, safe="") in ListAddress().toggled(written).replace("+", "%20")


@pytest.mark.parametrize("value", ['say "x"', "two\nlines", "\x1b[2J"])
def test_a_value_that_no_condition_can_name_is_no_link(value: str):
    assert condition("harness", value) is None


@pytest.mark.parametrize(
    ("tasks", "versions", "ranges"),
    [
        ([], [], None),
        ([(0, 0)], [0], None),
        ([(0, 0), (5, 5)], [0, 5], None),  # each task under one version, as in training
        ([(0, 32), (0, 32)], [0, 32], ((0, 0), (32, 32))),  # an evaluation before and after
        ([(0, 8)], list(range(9)), ((0, 2), (6, 8))),
        ([(3, 4), (3, 5), (6, 7)], list(range(9)), ((0, 3), (4, 8))),  # thirds share nothing; where most are shared
        ([(5, 4)], list(range(9)), None),  # one rollout over two versions is of neither side
    ],
)
def test_versions_are_offered_where_two_share_a_task(
    tasks: list[tuple[int, int]], versions: list[int], ranges: tuple[tuple[int, int], tuple[int, int]] | None
):
    expected = None if ranges is None else tuple(VersionRange(*each) for each in ranges)
    assert default_ranges(tasks, versions) == expected


def test_the_scripts_of_the_pages_are_licensed():
    assets = Path(__file__).parents[3] / "proxy" / "viewer" / "assets"
    assert "MIT License" in (assets / "uplot.LICENSE.txt").read_text(encoding="utf-8")
    assert "uPlot" in (assets / "uplot.js").read_text(encoding="utf-8")[:100]
