"""The contract of the planes, `trainer` and `admin`: what a request may hold and what its reply says.

Each type exists once: the routes validate request bodies by it, the ledger works on it, and the clients send it. Leases
and trajectories travel as `rolltap.wire` payloads, everything else as JSON.
"""
