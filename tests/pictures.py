"""Takes the pictures of docs/viewer.md, in a real browser: `python -m tests.pictures STORE`.

`python -m tests.pictures STORE TOKENIZER` takes those of examples/real-model: STORE is its grpo/data/rolltap.db.
`python -m tests.pictures --killed-proxy` takes that of docs/operating.md, in some minutes: Prometheus of a deployment
whose first proxy was killed. It shows expressions of deploy/monitoring's dashboard, as Grafana isn't to be had here.

STORE is what `rolltap demo` left (demo-out/data/rolltap.db): lists, groups, runs and comparisons are of it, and so are
a trainer's numbers, where it ran with ROLLTAP_TRAINER__REPORT__ANNOTATE=true. The conversation with thinking, tools,
a side call, a subagent and an edited history is held here, against the scripted engine.
"""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import aiohttp
from selenium.webdriver.common.keys import Keys

import rolltap
from rolltap.deployment.description import PROXIES
from rolltap.deployment.local import LocalDeployment, LocalOptions
from rolltap.engine.scripted import Rule, Script, ScriptedReply, ToolUse
from rolltap.engine.tiny import FOLDER
from rolltap.harnesses.client import AdminClient

from .faults import turns
from .faults.clients import Clients, turn
from .faults.local import free_ports, open_folder
from .harnesses.house import House, house
from .integration.browser import Browser, chromium
from .soak.world import Front

IMAGES = Path(__file__).parents[1] / "docs" / "images"
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("bash", "read", "edit", "task")
]
PATCH = (
    '--- a/parser.py\n+++ b/parser.py\n@@ -10,4 +10,6 @@ def parse(line):\n-    name, value = line.split("=")\n'
    '+    if "=" not in line:\n+        raise ValueError(f"no value: {line!r}")\n'
    '+    name, value = line.split("=", 1)\n'
    "     return name.strip(), value.strip()\n"
)
FAILURE = (
    'F..........                                  [100%]\n    def test_two_signs():\n>       assert parse("a=b=c") == '
    '("a", "b=c")\nE       ValueError: too many values to unpack (expected 2)\n1 failed, 10 passed in 0.21s'
)
SCRIPT = Script(
    rules=(
        Rule(when="Give a short title", turns=(ScriptedReply(say="Fix a failing parser test"),)),
        Rule(
            when="You look things up",
            turns=(
                ScriptedReply(call=(ToolUse("read", {"path": "FORMAT.md"}),)),
                ScriptedReply(say="The value may hold further signs: split once."),
            ),
        ),
        Rule(
            when="careful coding agent",
            turns=(
                ScriptedReply(
                    think="Look at the failing test first, then at the parser.",
                    say="Let me look at the failing test.",
                    call=(ToolUse("bash", {"command": "python -m pytest -q tests/test_parser.py 2>&1 | tail -20"}),),
                ),
                ScriptedReply(
                    call=(ToolUse("read", {"path": "parser.py"}), ToolUse("task", {"ask": "What says FORMAT.md?"}))
                ),
                ScriptedReply(
                    say="Split once, and say what is wrong with a line without a value.",
                    call=(ToolUse("edit", {"patch": PATCH}),),
                ),
                ScriptedReply(say="The parser splits at the first sign only now; all 11 tests pass."),
            ),
        ),
    )
)


async def converse(home: House) -> str:
    """The session of the conversation."""
    opened = await home.client.open_session(policy="tiny", tags={"harness": "codex", "team": "parsers"})
    headers = {"Authorization": f"Bearer {opened.endpoint.key}"}
    async with aiohttp.ClientSession(headers=headers) as http:

        async def ask(messages: list[dict[str, Any]], *, tools: bool = True) -> dict[str, Any]:
            body = {"model": "tiny", "messages": messages} | ({"tools": TOOLS} if tools else {})
            async with http.post(f"{home.urls['agent']}/v1/chat/completions", json=body) as response:
                return (await response.json())["choices"][0]["message"]

        def results(reply: dict[str, Any], *texts: str) -> list[dict[str, Any]]:
            calls = zip(reply["tool_calls"], texts, strict=True)
            return [reply, *({"role": "tool", "tool_call_id": call["id"], "content": text} for call, text in calls)]

        await ask([{"role": "user", "content": "Give a short title for: fix the failing parser test"}], tools=False)
        history: list[dict[str, Any]] = [
            {"role": "system", "content": "You are a careful coding agent. " + "Run the tests before and after. " * 12},
            {"role": "user", "content": "The parser test fails. Find out why and fix it."},
        ]
        history += results(await ask(history), FAILURE)
        reply = await ask(history)
        aside = [{"role": "system", "content": "You look things up."}, {"role": "user", "content": "FORMAT.md?"}]
        aside += results(await ask(aside), "A line is `name = value`. The value may hold further signs.")
        found = (await ask(aside))["content"]
        history += results(reply, 'def parse(line):\n    name, value = line.split("=")', found)
        history += results(await ask(history), "parser.py is changed")
        history[3] = {**history[3], "content": "[old output removed]"}
        await ask(history)
    return opened.session_id


@contextmanager
def viewing(store: Path, tokenizer: Path = FOLDER) -> Iterator[str]:
    """`rolltap view STORE`, with its trainer's steps if it is a demo's; the link that lets a browser in."""
    command = [sys.executable, "-m", "rolltap", "view", str(store), "--no-browser", "--tokenizer", str(tokenizer)]
    steps = store.parent.parent / "train" / "metrics.jsonl"
    command += ["--metrics", f"tiny={steps}"] if steps.exists() else []
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        yield server.stdout.readline().strip()
    finally:
        server.terminate()
        server.wait()


def take(browser: Browser, name: str, show: str = "", kind: str = "viewer") -> None:
    """A picture of the page as it stands; `show` is brought to the top."""
    browser.wait("h1")
    browser.run("document.querySelector('.where').style.visibility = 'hidden'")  # a temporary folder's name
    if show:
        browser.wait(show)
        browser.run(
            "scrollTo(0, document.querySelector(arguments[0]).getBoundingClientRect().top + scrollY - 62)", show
        )
    corner = {"type": "mouseMoved", "x": 1, "y": 1}  # where nothing has a tooltip
    browser.driver.execute_cdp_cmd("Input.dispatchMouseEvent", corner)
    browser.driver.save_screenshot(str(IMAGES / f"{kind}-{name}.png"))


def resize(browser: Browser, height: int) -> None:
    screen = {"width": 1280, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    browser.driver.execute_cdp_cmd("Emulation.setScrollbarsHidden", {"hidden": True})


def scripted_pictures(browser: Browser, session_id: str) -> None:
    resize(browser, 850)
    browser.open(f"/view/sessions/{session_id}")
    browser.wait("#call-6")
    take(browser, "session")
    browser.open(browser.attributes("#call-6", "data-tokens")[0] or "")
    browser.wait("#flow .tok.s")
    browser.press("x")
    take(browser, "tokens", "#tokens")
    browser.open(browser.attributes(".outline a[data-call='7']", "href")[0] or "")
    take(browser, "break", ".title h1:not(.mono)")


def clipped_call(store: Path) -> list[str]:
    """The call with the least of the clipped tokens' differences: none where the trainer wrote no annotations."""
    least = "SELECT call_id FROM annotations WHERE clipped > 0 ORDER BY mismatch_max LIMIT 1"
    with closing(sqlite3.connect(store)) as record:
        return [call_id for (call_id,) in record.execute(least)]


def run_pictures(browser: Browser, clipped: list[str]) -> None:
    resize(browser, 700)
    browser.open("/view/")
    browser.until(lambda: "reading" not in browser.text(".title"))
    browser.open("/view/?where=policy%3Dtiny&sort=output_tokens")
    browser.wait(".facet a")
    take(browser, "list")
    browser.open("/view/runs/tiny-frozen/compare")
    take(browser, "compare")
    resize(browser, 850)
    browser.open("/view/runs/tiny?with=tiny-frozen")
    browser.wait("#charts canvas")
    take(browser, "runs", "#charts")
    resize(browser, 1200)
    browser.open("/view/runs/tiny")
    browser.wait("#charts canvas")
    take(browser, "run")
    resize(browser, 850)
    browser.open("/view/groups?policy=tiny&status=acknowledged&spread=true")
    browser.open(browser.attributes("tbody tr", "data-href")[0] or "")
    take(browser, "group")
    browser.open(browser.attributes("a[href^='/view/diff']", "href")[-1] or "")
    take(browser, "diff")
    for call_id in clipped:
        browser.open(f"/view/calls/{call_id}")
        browser.wait("#flow .tok.s")
        browser.click("[data-mode=trainer]")
        browser.click("[data-place=trainer]")
        take(browser, "trainer", "#tokens")
    browser.open(browser.attributes(".tabs a", "href")[0] or "")
    browser.until(lambda: browser.seen("form[data-note]"))
    browser.press("l")
    browser.press("good", Keys.ENTER)
    browser.until(lambda: "good" in browser.text(".title"))
    take(browser, "label")


def real_model_pictures(browser: Browser, session_id: str) -> None:
    resize(browser, 1200)
    browser.open("/view/runs/tiny")
    browser.wait("#charts canvas")
    take(browser, "run", kind="real-model")
    resize(browser, 700)
    browser.open("/view/runs/tiny-frozen/compare")
    take(browser, "compare", kind="real-model")
    browser.open(f"/view/sessions/{session_id}")
    browser.open(browser.attributes("[data-tokens]", "data-tokens")[0] or "")
    browser.wait("#flow .tok.s")
    take(browser, "tokens", "#tokens", kind="real-model")


def pictures_of_real_model(store: Path, tokenizer: Path) -> None:
    right = rolltap.open(store).sessions(where="policy=tiny and reward>=1")
    first = min(right, key=lambda session: session.created_at)
    with (
        tempfile.TemporaryDirectory() as folder,
        chromium(Path(folder) / "profile") as driver,
        viewing(store, tokenizer) as link,
    ):
        browser = Browser(driver, link.partition("/view/")[0])
        browser.open(link.removeprefix(browser.admin))
        real_model_pictures(browser, first.id)


async def killed_proxy_picture() -> None:
    """`rolltap up --local` under a few agents, for as long as its alert needs; nobody starts the proxy again."""
    with open_folder() as folder, chromium(folder / "profile") as driver, ExitStack() as stack:
        options = LocalOptions(folder / "data", script=Path(turns.__file__), ports=free_ports())
        deployment = LocalDeployment(options)
        await asyncio.to_thread(deployment.start, print)
        stack.callback(deployment.stop)
        agents = [asyncio.create_task(talk(deployment, number)) for number in range(8)]
        await asyncio.sleep(60)
        killed = deployment.children[PROXIES[0]]
        killed.wanted = False
        killed.kill()
        browser = Browser(driver, deployment.layout.url("prometheus"))
        await asyncio.sleep(180)
        for agent in agents:
            agent.cancel()
        await asyncio.gather(*agents, return_exceptions=True)
        resize(browser, 1800)
        shown = (
            'up{job="rolltap"}',
            'ALERTS{alertname="RolltapProxyDown"}',
            "sum by (instance) (rolltap_calls_in_flight)",
        )
        graphs = [{f"g{at}.expr": text, f"g{at}.tab": 0, f"g{at}.range_input": "5m"} for at, text in enumerate(shown)]
        browser.open("/classic/graph?" + "&".join(map(urlencode, graphs)))
        browser.until(lambda: browser.count(".rickshaw_graph svg path") >= len(shown))
        browser.driver.save_screenshot(str(IMAGES / "operating-killed-proxy.png"))


async def talk(deployment: LocalDeployment, number: int) -> None:
    """An agent that talks through nginx, and asks again where a proxy has gone."""
    async with (
        AdminClient(deployment.urls["admin"], deployment.secrets["admin"]) as admin,
        aiohttp.ClientSession() as http,
    ):
        key = (await admin.open_session(policy="tiny")).endpoint.key
        clients = Clients(Front(deployment), http)  # type: ignore[arg-type]
        while True:
            await clients.ask(key, [turn(f"agent {number} at {time.time()}", say="Yes.", delay_s=2.0)])


async def main(store: Path) -> None:
    with tempfile.TemporaryDirectory() as folder, chromium(Path(folder) / "profile") as driver:
        async with house(SCRIPT, Path(folder), top_logprobs=5) as home:
            session_id = await converse(home)
            browser = Browser(driver, home.urls["admin"])
            await asyncio.to_thread(browser.open, f"/view/open?token={home.app.view_access.new_link()}")
            await asyncio.to_thread(scripted_pictures, browser, session_id)
        with viewing(store) as link:
            browser = Browser(driver, link.partition("/view/")[0])
            browser.open(link.removeprefix(browser.admin))
            run_pictures(browser, clipped_call(store))


if __name__ == "__main__":
    if sys.argv[1] == "--killed-proxy":
        asyncio.run(killed_proxy_picture())
    elif len(sys.argv) > 2:
        pictures_of_real_model(Path(sys.argv[1]), Path(sys.argv[2]))
    else:
        asyncio.run(main(Path(sys.argv[1])))
