"""Asks the model once, and keeps its whole answer, calls of tools included."""

import json
import os
import sys
import urllib.request
from pathlib import Path

body = {"model": os.environ["ROLLTAP_MODEL"], "messages": [{"role": "user", "content": sys.argv[1]}]}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps(body).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
)
with urllib.request.urlopen(request) as reply:
    Path("answer.txt").write_text(json.dumps(json.load(reply)["choices"][0]["message"]))
