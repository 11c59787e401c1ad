"""Takes rollouts from the ledger through their stages: tasks, attempts, nodes, and what an agent tried."""
