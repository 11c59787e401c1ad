"""The trainer's side of the contract: clients of the trainer plane, held leases, waiting for rollouts, weight pushes.

`protocol` makes requests and parses replies without I/O; `client` sends them, blocking or asynchronous. Neither needs
torch, so any trainer can use them.
"""
