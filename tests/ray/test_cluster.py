"""Replicas of a cluster come, go, break and are killed under load."""

from __future__ import annotations

import http.client
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("ray", reason="needs the extra `ray`")

from perf.tools.checked_load import CheckedLoad, Counts
from perf.tools.ray_cluster import STORE_BYTES
from staged_pool.api.config import ServerConfig
from staged_pool.ray import app, by_tokens
from staged_pool.ray.deployment import deployment_of
from staged_pool.ray.settings import read_settings
from staged_pool.runtime.config import EngineConfig
from tests.ray.breakable import Breakable

if TYPE_CHECKING:
    from perf.tools.ray_cluster import ServeCluster

pytestmark = pytest.mark.filterwarnings("default")  # Ray's own
CLIENTS = 8
NEW = ServerConfig(log_clients=True)

Vectors = Mapping[str, NDArray[np.float32]]


def assert_none_failed(counts: Counts) -> None:
    assert (counts.wrong, dict(counts.failed)) == (0, {})
    assert counts.answers


def test_a_rolling_update_fails_no_request(cluster: ServeCluster, model: EngineConfig, vectors: Vectors) -> None:
    cluster.deploy(app(model, num_replicas=2))
    old = set(cluster.pids())
    assert len(old) == 2
    with CheckedLoad(cluster.port, vectors, clients=CLIENTS) as load:
        cluster.deploy(app(model, server=NEW, num_replicas=2))
        cluster.wait(lambda: not old & set(cluster.pids()))
    assert_none_failed(load.counts)


def test_a_killed_replica_and_a_killed_node_cost_their_requests_in_flight(
    cluster: ServeCluster, model: EngineConfig, vectors: Vectors
) -> None:
    cluster.deploy(app(model, server=NEW, num_replicas=2))
    with CheckedLoad(cluster.port, vectors, clients=CLIENTS) as load:
        cluster.wait(lambda: load.counts.answers > 100)
        killed = cluster.kill_replica()
        cluster.wait(lambda: killed not in (pids := cluster.pids()) and len(pids) == cluster.running() == 2)
        replica_killed = load.counts
        spare = cluster.cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES)
        [first, *_] = [node for node in cluster.cluster.worker_nodes if node is not spare]
        old = set(cluster.pids())
        cluster.cluster.remove_node(first, allow_graceful=False)
        cluster.wait(lambda: len(old & (pids := set(cluster.pids()))) == 1 and len(pids) == cluster.running() == 2)
        node_killed = load.counts
        cluster.wait(lambda: load.counts.answers > node_killed.answers + 100)
    assert load.counts.wrong == 0
    assert load.counts.failed == node_killed.failed
    assert sum(replica_killed.failed.values()) <= CLIENTS
    assert sum((node_killed.failed - replica_killed.failed).values()) <= CLIENTS


def test_tokens_in_flight_add_a_replica_and_their_end_removes_it(
    cluster: ServeCluster, model: EngineConfig, vectors: Vectors
) -> None:
    scaling = by_tokens(
        100, min_replicas=1, max_replicas=2, upscale_delay_s=1, downscale_delay_s=2, look_back_period_s=1
    )
    cluster.deploy(app(model, autoscaling_config=scaling))
    cluster.wait(lambda: cluster.running() == 1)
    with CheckedLoad(cluster.port, vectors, clients=CLIENTS, texts=20) as load:
        cluster.wait(lambda: cluster.running() == 2)
    assert_none_failed(load.counts)
    with CheckedLoad(cluster.port, vectors, clients=1, rate=5) as load:
        cluster.wait(lambda: cluster.running() == 1)
    assert_none_failed(load.counts)


def test_a_broken_engine_is_replaced(cluster: ServeCluster, model: EngineConfig, vectors: Vectors) -> None:
    cluster.deploy(deployment_of(Breakable, read_settings(model), {"num_replicas": 1}))
    [old] = cluster.pids()
    connection = http.client.HTTPConnection("127.0.0.1", cluster.port)
    connection.request("POST", "/break")
    assert connection.getresponse().read() == b"broken"
    connection.close()
    cluster.wait(lambda: cluster.running() == 1 and cluster.pids() not in ([old], []))
    with CheckedLoad(cluster.port, vectors, clients=1) as load:
        time.sleep(1)
    assert_none_failed(load.counts)
