"""The router ranks replicas by their requests in flight, then by the reported drain time."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("ray", reason="needs the extra `ray`")

from staged_pool.ray.router import DrainTimeRouter


async def test_fewest_requests_come_first_then_the_shortest_drain_time() -> None:
    in_flight = {"busy": 5, "slow": 1, "quick": 1}  # "new" has had none yet
    drains = {"busy": {"drain_s": 0.1}, "slow": {"drain_s": 2.0}, "quick": {"drain_s": 0.3}, "new": {}}
    replicas = [SimpleNamespace(replica_id=name, routing_stats=stats) for name, stats in drains.items()]
    router = DrainTimeRouter.__new__(DrainTimeRouter)
    router._replica_queue_len_cache = in_flight
    ranks = await router.choose_replicas(replicas)
    assert [[replica.replica_id for replica in rank] for rank in ranks] == [["new"], ["quick"], ["slow"], ["busy"]]
