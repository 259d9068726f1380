"""Several nodes of a Ray cluster: one actor per node, which runs one launcher, which starts one
worker per GPU.

    ray job submit --working-dir . -- python scripts/ray/train.py --nodes 2 --gpus 8 -- \
--config llama_8b.toml

Exits with the code of the run. `ray job stop` is a stop request: the run saves first if
RAY_JOB_STOP_WAIT_TIME_S (3 unless it was set at `ray start`) is more than fault.grace_seconds.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import threading

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


class Node:
    """The launcher of a node."""

    launcher: subprocess.Popen[bytes] | None = None

    def address(self) -> tuple[str, int]:
        """Return this node's address and a free port of it."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    def run(self, arguments: list[str], variables: dict[str, str]) -> int:
        self.launcher = subprocess.Popen(
            ["./run_train.sh", *arguments], env={**os.environ, **variables}
        )
        return self.launcher.wait()

    def stop(self) -> None:
        if self.launcher:
            self.launcher.send_signal(signal.SIGUSR1)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--gpus", type=int, default=8, help="per node; 0: a worker per CPU core")
    parser.add_argument("--cpus", type=int, default=8, help="per node")
    parser.add_argument("arguments", nargs="*", help="those of titanlite train, after --")
    options = parser.parse_args()
    ray.init()
    # Ray does not replace lost actors, and need not, since the launchers restart their workers
    # (fault.min_nodes).
    share = {"CPU": options.cpus, "GPU": options.gpus}
    group = placement_group(
        [share] * options.nodes, strategy="STRICT_SPREAD"
    )  # each on its own node
    ray.get(group.ready())
    # Two calls at a time, since `stop` is called while `run` waits.
    actor = ray.remote(num_cpus=options.cpus, num_gpus=options.gpus, max_concurrency=2)(Node)
    places = [PlacementGroupSchedulingStrategy(group, bundle) for bundle in range(options.nodes)]
    nodes = [actor.options(scheduling_strategy=place).remote() for place in places]
    host, port = ray.get(nodes[0].address.remote())
    cluster = {"NNODES": str(options.nodes), "MASTER_ADDR": host, "MASTER_PORT": str(port)}
    cluster["NGPU"] = str(options.gpus or options.cpus)

    def stop(*_: object) -> None:  # in a thread: the signal may have interrupted Ray's own code
        threading.Thread(target=lambda: [node.stop.remote() for node in nodes]).start()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGUSR1, stop)
    ranks = [{**cluster, "NODE_RANK": str(rank)} for rank in range(options.nodes)]
    runs = [
        node.run.remote(options.arguments, rank) for node, rank in zip(nodes, ranks, strict=True)
    ]
    ray.wait(runs, num_returns=len(runs))  # the actor of a lost node has ended too, with an error
    return ray.get(runs[0])  # the launcher of node 0 decides how a run ends


if __name__ == "__main__":
    sys.exit(main())
