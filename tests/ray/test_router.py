"""The router ranks replicas by their requests in flight, then by the reported drain time."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("ray", reason="needs the extra `ray`")

from staged_pool.ray.router import DrainTimeRouter

pytestmark = pytest.mark.anyio


async def test_fewest_requests_come_first_then_the_shortest_drain_time_and_a_stall_last() -> None:
    in_flight = {"busy": 5, "slow": 1, "quick": 1}  # "new" has had none yet
    reports = {
        "stalled": {"drain_s": 0.0, "stalled": 1.0},
        "busy": {"drain_s": 0.1, "stalled": 0.0},
        "slow": {"drain_s": 2.0, "stalled": 0.0},
        "quick": {"drain_s": 0.3, "stalled": 0.0},
        "new": {},
    }
    replicas = [SimpleNamespace(replica_id=name, routing_stats=report) for name, report in reports.items()]
    router = DrainTimeRouter.__new__(DrainTimeRouter)
    router._replica_queue_len_cache = in_flight
    ranks = await router.choose_replicas(replicas)
    names = [[replica.replica_id for replica in rank] for rank in ranks]
    assert names == [["new"], ["quick"], ["slow"], ["busy"], ["stalled"]]
