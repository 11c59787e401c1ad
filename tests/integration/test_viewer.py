"""The viewer in a real browser: its flows, no error on the console, accessibility, and hostile text that stays text."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from selenium import webdriver
from selenium.webdriver.common.keys import Keys

from rolltap.contract.admin import FinishRollout, NewNote, NewReward
from rolltap.contract.trainer import AnnotateLease, CallAnnotation, LeaseRequest
from rolltap.engine.scripted import say
from rolltap.harnesses.client import ClaimedRollout
from rolltap.ledger.leases import LeaseKey
from rolltap.proxy.viewer.one_file import one_file
from rolltap.types import RolloutStatus, Task

from ..harnesses.house import House, house
from .browser import Browser, chromium

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(400)]  # a browser costs many CPU seconds

HOSTILE = "<script>window.broken = 1</script><img src=x onerror='window.broken = 1'></script>\u202e\x1b[31m{{7*7}}"
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
MIDDLE = """
const box = document.querySelector('.u-over').getBoundingClientRect()
return arguments[0] === 'left' ? box.left + box.width / 2 : box.top + box.height / 2
"""
CUT = """
return [...document.querySelectorAll('.scroll')].flatMap((region) => {
  const edge = region.getBoundingClientRect().right
  const past = (each) => each.checkVisibility() && each.getBoundingClientRect().right > edge + 0.5
  return [...region.querySelectorAll('th, td')].filter(past).map((each) => each.innerText)
})
"""
"""The cells of tables that go on past their region's right edge."""
SMALLEST_LABEL = """
const labels = [...document.querySelectorAll('svg text')].filter((each) => each.checkVisibility())
return Math.min(99, ...labels.map((each) => each.getBoundingClientRect().height))
"""
"""The height of the smallest text of a drawing, in pixels of the screen."""

TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    with chromium(tmp_path_factory.mktemp("chromium")) as driver:
        yield driver


@pytest.fixture
async def own_home(tmp_path: Path) -> AsyncIterator[House]:
    async with house(say(CALL, f"Three files. {HOSTILE}"), tmp_path, top_logprobs=3) as home:
        yield home


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def home(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[House]:
    """The module's, whose other tests have left sessions in it."""
    async with house(say(CALL, f"Three files. {HOSTILE}"), tmp_path_factory.mktemp("house"), top_logprobs=3) as home:
        yield home


async def visit(driver: webdriver.Chrome, home: House) -> Browser:
    browser = Browser(driver, home.urls["admin"])
    await asyncio.to_thread(browser.leave)
    await asyncio.to_thread(browser.open, f"/view/open?token={home.app.view_access.new_link()}")
    await asyncio.to_thread(browser.wait, "h1")
    return browser


async def talk(url: str, key: str) -> None:
    """A call with a tool, one with its result, and one with a history that was edited."""
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as http:

        async def ask(messages: list[dict[str, Any]]) -> dict[str, Any]:
            body = {"model": "tiny", "messages": messages, "tools": TOOLS}
            async with http.post(f"{url}/v1/chat/completions", json=body) as response:
                return (await response.json())["choices"][0]["message"]

        history: list[dict[str, Any]] = [{"role": "system", "content": "You are an agent. " * 60}]
        history.append({"role": "user", "content": f"How many files? {HOSTILE}"})
        history.append(await ask(history))
        history.append({"role": "tool", "tool_call_id": history[-1]["tool_calls"][0]["id"], "content": HOSTILE * 40})
        history.append(await ask(history))
        edited = [*history[:3], {**history[3], "content": "cut"}, history[4], {"role": "user", "content": "Sure?"}]
        await ask(edited)


async def a_group(home: House, name: str = "count") -> tuple[str, str]:
    """A group of two rollouts of a task of that name with rewards, and the session of the first."""
    task = Task(name, f"Count the files. {HOSTILE}", {}, ())
    group = await home.client.open_group(task, policy="tiny", n=2)
    for reward, rollout_id in enumerate(group.rollout_ids):
        session = await home.client.start_rollout(ClaimedRollout(rollout_id, ""), ttl=60)
        await talk(home.urls["agent"], session.endpoint.key)
        await home.client.reward(NewReward(rollout_id, float(reward), detail={"why": HOSTILE[:40]}))
        end = FinishRollout(RolloutStatus.SUCCEEDED, attempt=1, evaluation=f"{reward} of 1 {HOSTILE}")
        await home.client.finish_rollout(rollout_id, end)
    detail = await home.reader.group(group.id)
    assert detail.rollouts[0].session is not None
    return group.id, detail.rollouts[0].session.id


async def annotate(home: House, session_id: str) -> None:
    """A trainer with a hostile name says of every sampled token that it finds it less likely, and clips the last."""
    trainers = home.app.ledger.trainers
    lease = await trainers.lease(LeaseRequest(HOSTILE, "tiny", 1))
    calls = [
        CallAnnotation(
            line.id,
            logprobs=[None, *[token.logprob - 0.5 for token in tokens[1:]]],  # type: ignore[operator]
            clipped=[None, *[False] * (len(tokens) - 2), True],
        )
        for line in (await home.reader.session(session_id)).calls
        if len(tokens := (await home.reader.tokens(line.id, line.prompt_tokens)).tokens) > 1
    ]
    await trainers.annotate(LeaseKey(lease.id, lease.token), AnnotateLease(lease.token, 0, calls))


def flow(browser: Browser) -> None:
    """From the list to a token and back, by mouse and by keys."""
    browser.wait("tr[data-href]")
    browser.press("j", Keys.ENTER)
    browser.wait("[data-turn]")
    assert browser.count("[data-turn]") == 3
    assert "How many files?" in browser.text("#turns")
    browser.press("t")
    browser.wait("#flow .tok.s")
    browser.hover(".tok.s")
    tip = browser.text("#tip")
    assert "log-prob" in tip
    assert "trained" in tip
    assert browser.count("#tip tr") == 3
    browser.press("m")
    assert browser.attributes("[data-mode=mask]", "aria-pressed") == ["true"]
    browser.press("n")
    browser.wait("#tokens")
    folded = browser.count(".tok")
    browser.click("#unfold")
    browser.until(lambda: browser.count(".tok") > folded)
    assert browser.count(".tok.s.tr") > 5, "the parent's sampled tokens are shown as sampled and trained"
    browser.press("n")
    browser.wait("#break .out.first, #break .in.first")
    assert browser.text("h1:not(.mono)") == "Call 3"
    browser.press("x")
    assert browser.count("#flow .tok.hit.at") == 1, "x goes to the break"
    assert "context: the model did not sample it" in browser.text("#tip")
    browser.press("x")
    browser.until(lambda: browser.count("#flow .tok.s.hit") == 1)
    lowest = re.search(r"log-prob\s+(-[\d.]+)", browser.text("#tip"))
    assert lowest is not None
    browser.press(Keys.ARROW_RIGHT)
    another = re.search(r"log-prob\s+(-[\d.]+)", browser.text("#tip"))
    assert another is not None, "arrows go on from there"
    assert float(another[1]) >= float(lowest[1])
    browser.press("u")
    browser.wait("tr[data-href]")
    browser.write("input[type=search]", "files", Keys.ENTER)
    browser.until(lambda: "found" in browser.text(".title"))
    browser.run("document.querySelector('.scroll[data-live=rows]').focus()")
    browser.press("j", Keys.ENTER)  # with the table focused, as by the tabulator
    browser.wait("[data-turn]")
    browser.press("e")
    assert "no error" in browser.text("#said")
    browser.press("f")
    assert not browser.seen("#turns .body")
    assert "How many files?" in browser.text("#turns .message.user .first-words")
    browser.press("f")
    browser.run("navigator.clipboard.writeText = async (text) => { window.copied = text }")
    browser.click("#turns .message.user [data-copy]")
    browser.until(lambda: "How many files?" in (browser.run("return window.copied") or ""))
    browser.press("u")
    browser.until(lambda: "found" in browser.text(".title"))
    assert browser.run("return new URLSearchParams(location.search).get('q')") == "files", "the list is as it was"


async def test_from_the_list_to_a_token_and_its_break(driver: webdriver.Chrome, home: House):
    session = await home.client.open_session(policy="tiny", tags={"harness": "codex"})
    await talk(home.urls["agent"], session.endpoint.key)
    browser = await visit(driver, home)
    await asyncio.to_thread(flow, browser)
    assert await asyncio.to_thread(browser.problems) == []


def annotated_flow(browser: Browser, call_id: str) -> None:
    """A trainer's log-probs lie over the tokens: masked ones blank, clipped ones marked, the ratio in colour."""
    browser.open(f"/view/calls/{call_id}")
    browser.wait("#flow .tok.s")
    browser.click("[data-mode=trainer]")
    assert "no value" in browser.text("#legend")
    looks = [(names or "").split() for names in browser.attributes("#flow .tok.s", "class")]
    assert not any(name.startswith("q") for name in looks[0]), "the token without a value is blank"
    assert all("q1" in look for look in looks[1:]), "less likely"
    assert [("cl" in look) for look in looks[1:]] == [False] * (len(looks) - 2) + [True]
    browser.hover("#flow .tok.s", len(looks) - 1)
    tip = browser.text("#tip")
    for words in ("trainer", "0.607 trainer / engine", "clipped"):
        assert words in tip
    browser.press(Keys.ESCAPE)
    browser.click("#places [data-place=trainer]")
    assert "0.607 trainer / engine" in browser.text("#tip"), "where the two differ most"
    browser.until(lambda: browser.seen("#replay"))
    browser.click("#replay button")
    browser.until(lambda: browser.count("#replayed section") == 3)
    then, *now = browser.texts("#replayed pre")
    assert "Three files. <script>" in then, "recorded text is text here, too"
    assert all(now)


def label_flow(browser: Browser, session_id: str) -> None:
    """A label by keys, then a score that is none, then the selection."""
    browser.open(f"/view/sessions/{session_id}")
    browser.until(lambda: browser.seen("form[data-note]"))
    browser.press("l")
    browser.press(HOSTILE[:30], Keys.ENTER)
    browser.until(lambda: HOSTILE[:30] in browser.text(".title .chip.accent"))
    browser.until(lambda: browser.seen("form[data-note]"))
    browser.click("form[data-note] option[value=score]")
    browser.write("form[data-note] [name=name]", "taste")
    browser.write("form[data-note] [name=value]", "high", Keys.ENTER)
    browser.until(lambda: "a score is a number" in browser.text("form [role=status]"))
    browser.console()  # which tells of the 400
    browser.open("/view/?where=harness%3Dcodex")
    browser.wait(".facet a[aria-current]")
    browser.click("input[name=picked]")
    browser.until(lambda: browser.seen("#picked-notes"))
    assert browser.text("#picked-count") == "1 selected"
    assert "picked=" in (browser.attributes("#picked-ids", "href")[0] or "")
    browser.write("#picked [name=name]", "taken", Keys.ENTER)
    browser.until(lambda: "taken" in browser.text("tr[data-href] .tags"))
    browser.write("#save [name=name]", HOSTILE[:30], Keys.ENTER)
    browser.until(lambda: browser.texts("#saved a") == [HOSTILE[:30]])
    assert not browser.seen("#save"), "what has a name is not offered again"
    browser.open("/view/?sort=calls")
    assert browser.attributes("#saved a", "aria-current") == [None]
    browser.click("#saved a")
    browser.wait("#saved a[aria-current]")
    assert browser.attributes("form[role=search] input[name=where]", "value") == ["harness=codex"]
    browser.click("#saved button")
    assert not browser.seen("#saved")
    assert browser.seen("#save")
    browser.click("#export summary")
    assert "--where harness=codex" in browser.text("#export code")


async def test_a_list_that_follows_the_record_keeps_a_readers_place(driver: webdriver.Chrome, own_home: House):
    await talk(own_home.urls["agent"], (await own_home.open()).endpoint.key)
    browser = await visit(driver, own_home)
    await asyncio.to_thread(browser.wait, "tr[data-href]")
    browser.press("j")
    browser.run(
        "window.row = document.querySelector('tr[data-href]'); row.querySelector('a').focus();"
        "window.cells = [...row.children]; document.querySelector('#export').open = true"
    )
    await talk(own_home.urls["agent"], (await own_home.open()).endpoint.key)
    await asyncio.to_thread(browser.until, lambda: browser.count("tr[data-href]") == 2)
    await asyncio.to_thread(browser.until, lambda: browser.texts("tr[data-href] td:nth-child(6)") == ["3", "3"])
    assert browser.run("return row.isConnected && [...row.children].every((cell, at) => cell === cells[at])")
    assert browser.run("return row.contains(document.activeElement)"), "the focus stays on its row"
    assert browser.run("return row === document.querySelectorAll('tr[data-href]')[1]"), "the new one stands above"
    assert browser.count("tr[data-current]") == 1
    assert browser.run("return 'current' in row.dataset"), "the row that j went to"
    assert await asyncio.to_thread(browser.problems) == []


async def test_a_page_that_has_all_news_gets_nothing(driver: webdriver.Chrome, own_home: House):
    """What a page asks for while nothing happens has no body, and it asks less and less often."""
    await talk(own_home.urls["agent"], (await own_home.open()).endpoint.key)
    browser = await visit(driver, own_home)
    await asyncio.to_thread(browser.wait, "tr[data-href]")
    browser.run(
        "const ask = window.fetch; window.replies = [];"
        "window.fetch = async (...args) => { const reply = await ask(...args);"
        " window.replies.push(reply.status); return reply }"
    )
    await asyncio.to_thread(browser.until, lambda: browser.run("return replies.slice(-2).join()") == "304,304")
    assert await asyncio.to_thread(browser.problems) == []


async def test_a_page_follows_its_session(driver: webdriver.Chrome, home: House):
    session = await home.open()
    browser = await visit(driver, home)
    await asyncio.to_thread(browser.open, f"/view/sessions/{session.session_id}")
    await talk(home.urls["agent"], session.endpoint.key)
    await asyncio.to_thread(browser.wait, "#turns #call-3")
    assert browser.attributes("[data-turn]", "id") == ["call-1", "call-2", "call-3"]
    assert browser.count(".outline a") == 3
    assert browser.text("#outline summary") in ("", "3 calls")  # hidden on wide screens
    assert browser.count("#turns .empty") == 0
    await home.client.close_session(session.session_id)
    await asyncio.to_thread(browser.until, lambda: not browser.count("[data-news]"))
    assert browser.count("[data-turn]") == 3
    assert await asyncio.to_thread(browser.problems) == []


async def test_a_trainers_numbers_and_a_readers_labels(driver: webdriver.Chrome, own_home: House):
    """7 CPU seconds: most of them are the browser's."""
    _, session_id = await a_group(own_home)
    await annotate(own_home, session_id)
    calls = (await own_home.reader.session(session_id)).calls
    tagged = await own_home.client.open_session(policy="tiny", tags={"harness": "codex"})
    await talk(own_home.urls["agent"], tagged.endpoint.key)
    browser = await visit(driver, own_home)
    await asyncio.to_thread(annotated_flow, browser, calls[1].id)
    assert await asyncio.to_thread(browser.problems) == []
    await asyncio.to_thread(label_flow, browser, session_id)
    assert await asyncio.to_thread(browser.problems) == []


async def test_every_page_is_accessible_and_runs_nothing_that_is_recorded(driver: webdriver.Chrome, own_home: House):
    """10 CPU seconds: a browser lays out every page in two colour schemes and on a phone."""
    group_id, session_id = await a_group(own_home)
    await annotate(own_home, session_id)
    calls = (await own_home.reader.session(session_id)).calls
    browser = await visit(driver, own_home)
    paths = ["/", "/groups", f"/groups/{group_id}", "/runs", "/runs/tiny", f"/sessions/{session_id}"]
    paths += [f"/sessions/{session_id}/timeline", "/runs/tiny/compare?first=0&second=0&task=count"]
    paths += [f"/diff?first={session_id}&second={session_id}", "/runs/tiny?with=tiny", "/api", f"/calls/{calls[-1].id}"]

    def look(path: str) -> list[str]:
        browser.open(f"/view{path}")
        browser.wait("h1")
        if path.startswith("/runs/tiny") and "compare" not in path:
            browser.wait("#charts canvas")
            hover = {"bubbles": True, "clientX": browser.run(MIDDLE, "left"), "clientY": browser.run(MIDDLE, "top")}
            browser.run(
                "document.querySelector('.u-over').dispatchEvent(new MouseEvent('mousemove', arguments[0]))", hover
            )
            browser.until(lambda: "0.5" in browser.text(".u-legend"))
        return [f"{path}: {problem}" for problem in browser.problems()]

    for scheme in ("light", "dark"):
        browser.prefer(scheme)
        for path in paths:
            assert await asyncio.to_thread(look, path) == [], scheme
            assert browser.run(SMALLEST_LABEL) >= 9, path
    with browser.phone():
        for path in paths:
            await asyncio.to_thread(browser.open, f"/view{path}")
            assert browser.run("return document.documentElement.scrollWidth") <= 390, path
            assert browser.run(SMALLEST_LABEL) >= 9, path
            if path in (f"/sessions/{session_id}", paths[-1]):
                assert await asyncio.to_thread(browser.problems) == [], path
            if path == "/":
                assert (
                    browser.run("return document.querySelector('td.bars .reward').getBoundingClientRect().right") < 390
                )
        assert not browser.seen(".outline a"), "a call's page: the outline is folded"
    await asyncio.to_thread(browser.until, lambda: browser.seen(".outline a"))


async def test_a_laptops_screen_shows_every_column_whatever_is_recorded(driver: webdriver.Chrome, own_home: House):
    """Long names, several labels and scores, breaks and flaws: no list scrolls sideways."""
    _, session_id = await a_group(own_home, "a-task-of-another-package__with-a-name-of-its-own-1234567890")
    tags = {"harness": "mini-swe-agent-inprocess", "team": "somebody-with-a-long-name", "purpose": "eval"}
    session = await own_home.client.open_session(policy="tiny", tags=tags)
    await talk(own_home.urls["agent"], session.endpoint.key)
    for target in (session_id, session.session_id):
        for name, value in (("faithful-to-the-task", 0.25), ("taste", 1.0)):
            await own_home.reader.note(NewNote("score", name, value, session_id=target, author="a"))
        for name in ("good", "look-at-this-one-again", "another-label"):
            await own_home.reader.note(NewNote("label", name, session_id=target, author="a"))
    browser = await visit(driver, own_home)
    for path in ("/", "/groups", "/runs", "/?where=policy%3Dtiny&sort=output_tokens"):
        await asyncio.to_thread(browser.open, f"/view{path}")
        await asyncio.to_thread(browser.wait, "tbody tr")
        assert await asyncio.to_thread(browser.run, CUT) == [], path


async def test_one_file_works_without_a_server(driver: webdriver.Chrome, home: House, tmp_path: Path):
    group_id, session_id = await a_group(home)
    for what in (group_id, session_id):
        page = tmp_path / f"{what}.html"
        page.write_text(await one_file(home.reader, what), encoding="utf-8")
        browser = Browser(driver, page.as_uri())
        await asyncio.to_thread(browser.leave)

        def look(browser: Browser = browser) -> None:
            browser.open("")
            browser.click("a[href^='#tokens-']")
            browser.wait("#flow .tok")
            browser.click("#unfold")

        await asyncio.to_thread(look)
        assert await asyncio.to_thread(browser.problems) == []
    page = tmp_path / "run.html"
    page.write_text(await one_file(home.reader, "tiny"), encoding="utf-8")
    browser = Browser(driver, page.as_uri())
    await asyncio.to_thread(browser.open, "")
    await asyncio.to_thread(browser.wait, "#charts canvas")
    assert await asyncio.to_thread(browser.problems) == []
