"""A cluster of Ray on this machine, with Ray Serve on a free port."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import psutil

from staged_pool.ray.deployment import NAME

START_S: Final = 300.0
"""Limit for the start of replicas, in seconds."""
STORE_BYTES: Final = 100_000_000

_ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5",
    "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5",
}
"""Variables of all processes of a cluster; the autoscaler learns of a load within a second, not within ten."""

HAPROXY: Final = os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1"
"""True if HAProxy takes requests in place of Serve's proxy in Python: a choice of the whole process."""


class ServeCluster:
    """A running cluster, with Serve on a port of 127.0.0.1."""

    def __init__(self, cluster: Any, port: int) -> None:
        self.cluster = cluster
        """Ray's `Cluster`."""
        self.port = port

    def deploy(self, application: Any, prefix: str = "/") -> None:
        """Run an application, or update the one that runs, and wait until it is ready."""
        from ray import serve

        serve.run(application, route_prefix=prefix)

    def running(self, name: str = NAME) -> int:
        """Return the number of replicas of a deployment that take requests."""
        from ray import serve

        deployment = serve.status().applications["default"].deployments.get(name)
        return 0 if deployment is None else int(deployment.replica_states.get("RUNNING", 0))

    def pids(self, name: str = NAME) -> Sequence[int]:
        """Return the processes of the replicas of a deployment, the oldest one first."""
        found = []
        for process in psutil.Process().children(recursive=True):
            try:
                if " ".join(process.cmdline()).startswith(f"ray::ServeReplica:default:{name}"):  # and a method
                    found.append((process.create_time(), process.pid))
            except psutil.NoSuchProcess:
                continue
        return [pid for _, pid in sorted(found)]

    def wait(self, condition: Callable[[], bool], within_s: float = START_S) -> float:
        """Wait until a condition holds, and return the seconds that it took.

        Raises:
            TimeoutError: It does not hold in time.
        """
        began_at = time.monotonic()
        while not condition():
            if time.monotonic() - began_at > within_s:
                raise TimeoutError(f"not so within {within_s:g} s")
            time.sleep(0.1)
        return time.monotonic() - began_at

    def kill_replica(self, name: str = NAME) -> int:
        """Kill the oldest replica of a deployment with SIGKILL, and return its process id."""
        pid = self.pids(name)[0]
        os.kill(pid, signal.SIGKILL)
        return pid


@contextmanager
def serve_cluster(cores: Sequence[int]) -> Iterator[ServeCluster]:
    """Run a cluster for a block, with Serve on it.

    Args:
        cores: CPUs that each node offers; the first node is the head. They need not exist.
    """
    os.environ.update(_ENVIRONMENT)
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    head = {"num_cpus": cores[0], "object_store_memory": STORE_BYTES, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)  # in Ray's default folder: it takes no other
    try:
        for each in cores[1:]:
            cluster.add_node(num_cpus=each, object_store_memory=STORE_BYTES)
        ray.init(address=cluster.address, log_to_driver=False)
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": (port := _free_port())})
        yield ServeCluster(cluster, port)
    finally:
        ray.shutdown()
        cluster.shutdown()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
