"""An agent of one tool that shortens what it sends, as many harnesses do: only the last reply of a tool is kept.

Its arguments are the instruction and the command that ends it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from typing import Any

COMMAND = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
TOOLS = [{"type": "function", "function": {"name": "bash", "description": "Runs a command", "parameters": COMMAND}}]


def complete(messages: list[dict[str, Any]]) -> dict[str, Any]:
    body = {"model": os.environ["OPENAI_MODEL"], "messages": messages, "tools": TOOLS}
    headers = {"content-type": "application/json", "authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as reply:
        return json.load(reply)["choices"][0]["message"]


messages: list[dict[str, Any]] = [
    {"role": "system", "content": "You work in a folder with bash. " * 8},
    {"role": "user", "content": sys.argv[1]},
]
while True:
    reply = complete(messages)
    messages.append(reply)
    for call in reply.get("tool_calls") or sys.exit("no call"):
        command = json.loads(call["function"]["arguments"])["command"]
        if command == sys.argv[2]:
            sys.exit(0)
        done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=10)
        for message in messages:
            if message["role"] == "tool":
                message["content"] = "(old)"
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": done.stdout + done.stderr})
