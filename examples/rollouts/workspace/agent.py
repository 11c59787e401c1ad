"""The smallest agent: asks the model for one shell command, and runs it."""

import json
import os
import subprocess
import sys
import urllib.request

body = {"model": os.environ["ROLLTAP_MODEL"], "messages": [{"role": "user", "content": sys.argv[1]}]}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps(body).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
)
with urllib.request.urlopen(request) as reply:
    command = json.load(reply)["choices"][0]["message"]["content"]
subprocess.run(["sh", "-c", command], check=True)
