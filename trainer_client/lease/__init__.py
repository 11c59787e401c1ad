"""The trainer's side of the contract: the trainer plane's client, held leases, waiting for rollouts, pushed weights.

`protocol` makes requests and reads replies without any input or output; `client` sends them, blocking or asynchronous.
Neither needs torch, so any trainer can stand on them.
"""

from __future__ import annotations

from rolltap.contract.trainer import LeaseOptions
from rolltap.trainer_client.lease.client import AsyncTrainerClient, TrainerClient
from rolltap.trainer_client.lease.folder import run_id

__all__ = ["AsyncTrainerClient", "LeaseOptions", "TrainerClient", "run_id"]
