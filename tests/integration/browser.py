"""A real browser for tests: every question about a page is one script, so that a page that changes meanwhile can't
leave a test with a node that is gone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

from ..conftest import program

AXE = (files("axe_core_python") / "axe.min.js").read_text(encoding="utf-8")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--window-size=1280,850")
WAIT_S = 40
"""How long a page may take to show what a test waits for, on a machine that is busy with other work."""


@dataclass
class Browser:
    """A browser that was let in. Its methods block."""

    driver: webdriver.Chrome
    admin: str = ""

    def open(self, path: str) -> None:
        self.driver.get(self.admin + path)

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def count(self, selector: str) -> int:
        return self.run("return document.querySelectorAll(arguments[0]).length", selector)

    def texts(self, selector: str) -> list[str]:
        """What a reader sees of every element; "" of a hidden one."""
        visible = "(each) => each.checkVisibility() ? each.innerText : ''"
        return self.run(f"return [...document.querySelectorAll(arguments[0])].map({visible})", selector)

    def text(self, selector: str) -> str:
        """What a reader sees of the first element; "" where there is none."""
        return next(iter(self.texts(selector)), "")

    def attributes(self, selector: str, name: str) -> list[str | None]:
        return self.run(
            "return [...document.querySelectorAll(arguments[0])].map((each) => each.getAttribute(arguments[1]))",
            selector,
            name,
        )

    def seen(self, selector: str) -> bool:
        """Whether the first element is there and visible."""
        return self.run("return document.querySelector(arguments[0])?.checkVisibility() ?? false", selector)

    def until(self, holds: Callable[[], Any]) -> None:
        """Asks again until it holds; a node that a page replaces meanwhile is asked for again."""
        WebDriverWait(self.driver, WAIT_S, 0.1, (StaleElementReferenceException,)).until(lambda _: holds())

    def wait(self, selector: str) -> None:
        self.until(lambda: self.count(selector))

    def click(self, selector: str) -> None:
        """As a mouse does, once there is something to click."""
        self.wait(selector)
        self.until(lambda: self.driver.find_element(By.CSS_SELECTOR, selector).click() is None)

    def hover(self, selector: str, position: int = 0) -> None:
        """The pointer comes over the element at `position` of those that match."""
        self.run(
            "document.querySelectorAll(arguments[0])[arguments[1]]"
            ".dispatchEvent(new PointerEvent('pointerover', {bubbles: true}))",
            selector,
            position,
        )

    def press(self, *keys: str) -> None:
        """Keys go to whatever has the focus."""
        ActionChains(self.driver).send_keys(*keys).perform()

    def write(self, selector: str, *keys: str) -> None:
        """Keys go to a field."""
        self.click(selector)
        self.press(*keys)

    def leave(self) -> None:
        """Ends the last page, which asks for news of a server that is gone, and forgets what it said."""
        self.driver.get("about:blank")
        self.console()

    def console(self) -> list[str]:
        """What the console said since it was last asked."""
        return [entry["message"] for entry in self.driver.get_log("browser")]  # type: ignore[no-untyped-call]

    def problems(self) -> list[str]:
        """What the console says, and what accessibility checks find."""
        problems = self.console()
        self.run(AXE)
        results = self.driver.execute_async_script("axe.run().then(arguments[arguments.length - 1])")
        problems += [f"{each['id']}: {node['html'][:200]}" for each in results["violations"] for node in each["nodes"]]
        if self.run("return window.broken"):
            problems.append("recorded text was run")
        return problems

    @contextmanager
    def phone(self, width: int = 390) -> Iterator[None]:
        """The page on a phone's screen."""
        screen = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": True}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        try:
            yield
        finally:
            self.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})

    def prefer(self, scheme: str) -> None:
        """The system's colours from now on: `light` or `dark`."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


@contextmanager
def chromium(profile: Path) -> Iterator[webdriver.Chrome]:
    """The distribution's Chromium, without a window, with a profile of its own."""
    options = Options()
    options.binary_location = program("chromium")
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(program("chromedriver")))
    driver.set_script_timeout(300)
    try:
        yield driver
    finally:
        driver.quit()
