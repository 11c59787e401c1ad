"""The agent of a node's task in a soak: three turns, asked again as an SDK does. It needs the standard library only."""

from __future__ import annotations

import json
import os
import random
import sys
import time
import urllib.error
import urllib.request
from typing import Any

TRIES = 30


def ask(messages: list[dict[str, str]]) -> str:
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages}).encode()
    headers = {"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "content-type": "application/json"}
    for number in range(TRIES):
        marked = {**headers, "x-stainless-retry-count": str(number)}
        request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, marked)
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                reply: dict[str, Any] = json.load(response)
                return reply["choices"][0]["message"]["content"]
        except (urllib.error.URLError, OSError, ValueError) as error:
            print(error, file=sys.stderr)
            time.sleep(min(4, 0.2 * 2**number))
    sys.exit("no answer")


messages: list[dict[str, str]] = []
for number in range(3):
    turn = {"say": f"{random.random()} a reply", "delay_s": random.uniform(0, 0.3)}
    messages.append({"role": "user", "content": f"{number} {random.random()} turn={json.dumps(turn)}"})
    messages.append({"role": "assistant", "content": ask(messages)})
