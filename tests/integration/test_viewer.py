"""The viewer in a real browser: its flows, no error on the console, accessibility, and hostile text that stays text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait

from rolltap.contract.admin import FinishRollout, NewReward
from rolltap.contract.annotations import AnnotateLease, CallAnnotation
from rolltap.contract.trainer import LeaseRequest
from rolltap.engine.scripted import say
from rolltap.harnesses.client import ClaimedRollout
from rolltap.ledger.leases import LeaseKey
from rolltap.proxy.viewer.one_file import one_file
from rolltap.types import RolloutStatus, Task

from ..conftest import program
from ..harnesses.house import House, house

pytestmark = pytest.mark.timeout(240)

AXE = (files("axe_core_python") / "axe.min.js").read_text(encoding="utf-8")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--window-size=1280,850")
HOSTILE = "<script>window.broken = 1</script><img src=x onerror='window.broken = 1'></script>\u202e\x1b[31m{{7*7}}"
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}]


@dataclass
class Browser:
    """A browser that was let in. Its methods block."""

    driver: webdriver.Chrome
    admin: str = ""

    def open(self, path: str) -> None:
        self.driver.get(self.admin + path)

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def one(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def wait(self, selector: str) -> WebElement:
        WebDriverWait(self.driver, 40).until(lambda _: self.all(selector))
        return self.one(selector)

    def press(self, *keys: str) -> None:
        self.one("body").send_keys(*keys)

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def leave(self) -> None:
        """Ends the last page, which asks for news of a server that is gone, and forgets what it said."""
        self.driver.get("about:blank")
        self.driver.get_log("browser")  # type: ignore[no-untyped-call]

    def problems(self) -> list[str]:
        """What the console says, and what accessibility checks find."""
        said = [entry["message"] for entry in self.driver.get_log("browser")]  # type: ignore[no-untyped-call]
        self.run(AXE)
        found = self.driver.execute_async_script("axe.run().then(arguments[arguments.length - 1])")
        said += [f"{each['id']}: {node['html'][:200]}" for each in found["violations"] for node in each["nodes"]]
        if self.run("return window.broken"):
            said.append("recorded text was run")
        return said


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    options = Options()
    options.binary_location = program("chromium")
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(program("chromedriver")))
    driver.set_script_timeout(90)
    yield Browser(driver)
    driver.quit()


@pytest.fixture
async def home(tmp_path: Path) -> AsyncIterator[House]:
    async with house(say(CALL, f"Three files. {HOSTILE}"), tmp_path, top_logprobs=3) as home:
        yield home


async def visit(chromium: Browser, home: House) -> Browser:
    browser = Browser(chromium.driver, home.urls["admin"])
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


async def a_group(home: House) -> tuple[str, str]:
    """A group of two rollouts with rewards, and the session of the first."""
    task = Task("count", f"Count the files. {HOSTILE}", {}, ())
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
    assert len(browser.all("[data-turn]")) == 3
    assert "How many files?" in browser.one("#turns").text
    browser.press("t")
    browser.wait("#flow .tok.s")
    browser.run("arguments[0].dispatchEvent(new PointerEvent('pointerover', {bubbles: true}))", browser.one(".tok.s"))
    tip = browser.one("#tip").text
    assert "log-prob" in tip
    assert "trained" in tip
    assert len(browser.all("#tip tr")) == 3
    browser.press("m")
    assert browser.one("[data-mode=mask]").get_attribute("aria-pressed") == "true"
    browser.press("n")
    browser.wait("#tokens")
    folded = len(browser.all(".tok"))
    browser.one("#unfold").click()
    WebDriverWait(browser.driver, 40).until(lambda _: len(browser.all(".tok")) > folded)
    assert len(browser.all(".tok.s.tr")) > 5, "the parent's sampled tokens are shown as sampled and trained"
    browser.press("n")
    browser.wait("#break .out.first, #break .in.first")
    assert browser.one("h1:not(.mono)").text == "Call 3"
    browser.press("u")
    browser.wait("tr[data-href]")
    search = browser.one("input[type=search]")
    search.send_keys("files", Keys.ENTER)
    WebDriverWait(browser.driver, 40).until(lambda _: "found" in browser.one(".title").text)


async def test_from_the_list_to_a_token_and_its_break(chromium: Browser, home: House):
    session = await home.client.open_session(policy="tiny", tags={"harness": "codex"})
    await talk(home.urls["agent"], session.endpoint.key)
    browser = await visit(chromium, home)
    await asyncio.to_thread(flow, browser)
    assert await asyncio.to_thread(browser.problems) == []


def annotated_flow(browser: Browser, call_id: str) -> None:
    """A trainer's log-probs lie over the tokens: masked ones blank, clipped ones marked, the ratio in colour."""
    browser.open(f"/view/calls/{call_id}")
    browser.wait("#flow .tok.s")
    browser.one("[data-mode=trainer]").click()
    assert "no value" in browser.one("#legend").text
    sampled = browser.all("#flow .tok.s")
    looks = [(token.get_attribute("class") or "").split() for token in sampled]
    assert not any(name.startswith("q") for name in looks[0]), "the token without a value is blank"
    assert all("q1" in look for look in looks[1:]), "less likely"
    assert [("cl" in look) for look in looks[1:]] == [False] * (len(looks) - 2) + [True]
    browser.run("arguments[0].dispatchEvent(new PointerEvent('pointerover', {bubbles: true}))", sampled[-1])
    tip = browser.one("#tip").text
    for said in ("trainer", "0.607 trainer / engine", "clipped"):
        assert said in tip


def label_flow(browser: Browser, session_id: str) -> None:
    """A label by keys, then a score that is none, then the selection."""
    browser.open(f"/view/sessions/{session_id}")
    WebDriverWait(browser.driver, 40).until(lambda _: browser.one("form[data-note]").is_displayed())
    browser.press("l")
    browser.driver.switch_to.active_element.send_keys(HOSTILE[:30], Keys.ENTER)
    WebDriverWait(browser.driver, 40).until(lambda _: browser.all(".title .chip.accent"))
    assert HOSTILE[:30] in browser.one(".title .chip.accent").text
    form = browser.wait("form[data-note]")
    WebDriverWait(browser.driver, 40).until(lambda _: form.is_displayed())
    form.find_element(By.CSS_SELECTOR, "option[value=score]").click()
    form.find_element(By.NAME, "name").send_keys("taste")
    form.find_element(By.NAME, "value").send_keys("high", Keys.ENTER)
    WebDriverWait(browser.driver, 40).until(lambda _: "a score is a number" in browser.one("form [role=status]").text)
    browser.driver.get_log("browser")  # type: ignore[no-untyped-call]  # which tells of the 400
    browser.open("/view/?where=harness%3Dcodex")
    browser.wait("#export summary").click()
    assert "--where harness=codex" in browser.one("#export code").text


async def test_a_page_follows_its_session(chromium: Browser, home: House):
    session = await home.client.open_session(policy="tiny")
    browser = await visit(chromium, home)
    await asyncio.to_thread(browser.open, f"/view/sessions/{session.session_id}")
    await talk(home.urls["agent"], session.endpoint.key)
    await asyncio.to_thread(browser.wait, "#turns #call-3")
    numbers = [turn.get_attribute("id") for turn in browser.all("[data-turn]")]
    assert numbers == ["call-1", "call-2", "call-3"]
    assert len(browser.all(".outline a")) == 3
    assert browser.one("#outline summary").text in ("", "3 calls")  # hidden on wide screens
    assert not browser.all("#turns .empty")
    await home.client.close_session(session.session_id)
    wait = WebDriverWait(browser.driver, 40)
    await asyncio.to_thread(wait.until, lambda _: not browser.all("[data-news]"))
    assert len(browser.all("[data-turn]")) == 3
    assert await asyncio.to_thread(browser.problems) == []


async def test_a_trainers_numbers_and_a_readers_labels(chromium: Browser, home: House):
    _, session_id = await a_group(home)
    await annotate(home, session_id)
    calls = (await home.reader.session(session_id)).calls
    tagged = await home.client.open_session(policy="tiny", tags={"harness": "codex"})
    await talk(home.urls["agent"], tagged.endpoint.key)
    browser = await visit(chromium, home)
    await asyncio.to_thread(annotated_flow, browser, calls[1].id)
    assert await asyncio.to_thread(browser.problems) == []
    await asyncio.to_thread(label_flow, browser, session_id)
    assert await asyncio.to_thread(browser.problems) == []


async def test_every_page_is_accessible_and_runs_nothing_that_is_recorded(chromium: Browser, home: House):
    group_id, session_id = await a_group(home)
    await annotate(home, session_id)
    calls = (await home.reader.session(session_id)).calls
    browser = await visit(chromium, home)
    paths = ["/", "/groups", f"/groups/{group_id}", "/runs", "/runs/tiny", f"/sessions/{session_id}"]
    paths += [f"/sessions/{session_id}/timeline", "/runs/tiny/compare?first=0&second=0&task=count"]
    paths += [f"/calls/{calls[-1].id}"]

    def look(path: str) -> list[str]:
        browser.open(f"/view{path}")
        browser.wait("h1")
        return [f"{path}: {problem}" for problem in browser.problems()]

    for scheme in ("light", "dark"):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        for path in paths if scheme == "light" else (paths[0], paths[4], *paths[-4:]):
            assert await asyncio.to_thread(look, path) == [], scheme
    phone = {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    browser.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
    try:
        for path in paths:
            await asyncio.to_thread(browser.open, f"/view{path}")
            assert browser.run("return document.documentElement.scrollWidth") <= 390, path
    finally:
        browser.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


async def test_one_file_works_without_a_server(chromium: Browser, home: House, tmp_path: Path):
    group_id, session_id = await a_group(home)
    for what in (group_id, session_id):
        page = tmp_path / f"{what}.html"
        page.write_text(await one_file(home.reader, what), encoding="utf-8")
        browser = Browser(chromium.driver, page.as_uri())

        def look(browser: Browser = browser) -> None:
            browser.open("")
            browser.wait("a[href^='#tokens-']").click()
            browser.wait("#flow .tok")
            browser.one("#unfold").click()

        await asyncio.to_thread(look)
        assert await asyncio.to_thread(browser.problems) == []
