"""The trainer's side of the contract: clients of the trainer plane, held leases, waiting for rollouts, weight pushes.

Neither of the clients needs torch, so any trainer can use them.
"""

from __future__ import annotations

from rolltap.contract.trainer import LeaseOptions
from rolltap.trainer_client.lease.client import AsyncTrainerClient, TrainerClient
from rolltap.trainer_client.lease.folder import run_id

__all__ = ["AsyncTrainerClient", "LeaseOptions", "TrainerClient", "run_id"]
