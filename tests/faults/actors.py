"""Processes that a scenario kills or halts: a trainer, and an agent that asks and asks.

python actors.py trainer URL NAME STEP TTL  leases, says "leased ID TOKEN GROUPS", acknowledges
                                                when it gets a line, says "acked"
python actors.py agent URL KEY              asks without end, says each status
"""

from __future__ import annotations

import http.client
import json
import sys
import time
from urllib.parse import urlsplit

from rolltap.contract.trainer import LeaseOptions
from rolltap.trainer_client.lease.client import TrainerClient


def trainer(url: str, name: str, step: str, ttl: str) -> None:
    client = TrainerClient(url, "trainer-key", name)
    lease = client.lease("tiny", groups=4, options=LeaseOptions(ttl=float(ttl), wait=5.0))
    assert lease is not None
    print("leased", lease.id, lease.token, *(leased.group.id for leased in lease.groups), flush=True)
    sys.stdin.readline()
    client.ack(lease, int(step))
    print("acked", flush=True)
    time.sleep(60)


def agent(url: str, key: str) -> None:
    body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "go on"}]})
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    while True:
        connection = http.client.HTTPConnection(urlsplit(url).netloc)
        connection.request("POST", "/v1/chat/completions", body, headers)
        print(connection.getresponse().status, flush=True)
        connection.close()
        time.sleep(0.05)


if __name__ == "__main__":
    {"trainer": trainer, "agent": agent}[sys.argv[1]](*sys.argv[2:])
