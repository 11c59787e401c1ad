"""Uses a web page as a person does: looks at it, and clicks where the model says. Nothing here knows of rolltap."""

import re
import shutil
import sys
from pathlib import Path

from openai import OpenAI
from selenium import webdriver
from selenium.webdriver.common.actions.action_builder import ActionBuilder

WIDTH, HEIGHT = 320, 224
MOST_STEPS = 6
RULES = f"""You see a web page of {WIDTH} x {HEIGHT} pixels. Say what to do next, in one line: `click X Y`, or
`answer WORDS` when you know the answer."""
ACTION = re.compile(r"click (?P<x>\d+) (?P<y>\d+)|answer (?P<words>.+)")


def browser() -> webdriver.Chrome:
    """Chromium without a window, of the size that the model is told."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    screen = {"width": WIDTH, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    return driver


def seen(driver: webdriver.Chrome, text: str) -> dict:
    """A message with what the page looks like now."""
    image = {"url": f"data:image/png;base64,{driver.get_screenshot_as_base64()}"}
    return {"role": "user", "content": [{"type": "text", "text": text}, {"type": "image_url", "image_url": image}]}


def click(driver: webdriver.Chrome, x: int, y: int) -> None:
    if x < WIDTH and y < HEIGHT:
        actions = ActionBuilder(driver)
        actions.pointer_action.move_to_location(x, y).click()
        actions.perform()


def play(driver: webdriver.Chrome, task: str) -> str:
    """The model's answer; empty if it gives none."""
    client = OpenAI()
    messages: list = [{"role": "system", "content": RULES}, seen(driver, task)]
    for _ in range(MOST_STEPS):
        said = client.chat.completions.create(model="tiny", messages=messages).choices[0].message.content or ""
        messages.append({"role": "assistant", "content": said})
        action = ACTION.search(said)
        if action is None:
            messages.append({"role": "user", "content": RULES})
        elif action["words"]:
            return action["words"]
        else:
            click(driver, int(action["x"]), int(action["y"]))
            messages.append(seen(driver, "The page now:"))
    return ""


if __name__ == "__main__":
    driver = browser()
    try:
        driver.get(Path("page.html").resolve().as_uri())
        Path("answer.txt").write_text(play(driver, sys.argv[1]), encoding="utf-8")
    finally:
        driver.quit()
