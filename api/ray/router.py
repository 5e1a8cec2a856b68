"""Request router of Ray Serve, by requests in flight and predicted drain times."""

from __future__ import annotations

import random
from typing import Any, Final

from ray.serve.request_router import FIFOMixin, PendingRequest, RequestRouter, RunningReplica

DRAIN_S: Final = "drain_s"
"""Key of a replica's report: predicted seconds for everything in flight there."""

STALLED: Final = "stalled"
"""Key of a replica's report: 1 while a forward there runs far longer than predicted, else 0."""


class DrainTimeRouter(FIFOMixin, RequestRouter):
    """Send a request to the replica with the fewest requests in flight; among equals, to the one that drains first.

    Reports are as old as the period of `RequestRouterConfig`, and a router that follows them alone sends every request
    of a period to one replica. Its own count of requests is always current, so this comes first. Replicas that are
    equal in both are tried in random order. A replica whose device is stalled comes last.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return ranks of one replica each, the best one first."""
        return [[replica] for replica in sorted(candidate_replicas, key=self._rank)]

    def _rank(self, replica: Any) -> tuple[float, int, float, float]:
        report = replica.routing_stats
        in_flight = self.replica_queue_len_cache.get(replica.replica_id) or 0
        return report.get(STALLED, 0.0), in_flight, report.get(DRAIN_S, 0.0), random.random()
