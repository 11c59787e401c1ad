"""A Ray cluster of several nodes on this machine, in a process of its own: `python -m tests.integration.ray_cluster`.

Obeys lines on stdin and answers each with one on stdout: `add` starts a node, `kill N` kills the N-th that lives with
SIGKILL, anything else ends the cluster. The first line of all is the cluster's address.
"""

from __future__ import annotations

import sys
from typing import Any

from ray.cluster_utils import Cluster

ONE_NODE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80_000_000}


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args={**ONE_NODE, "include_dashboard": False})
    nodes = []
    print("address", cluster.address, flush=True)
    for line in sys.stdin:
        match line.split():
            case ["add"]:
                nodes.append(cluster.add_node(**ONE_NODE))
            case ["kill", number]:
                cluster.remove_node(nodes.pop(int(number)), allow_graceful=False)
            case _:
                break
        print("done", len(nodes), flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
