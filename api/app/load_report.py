"""The server's load in the forms that routers read: JSON of `/load`, ORCA's header, and gauges."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from staged_pool.runtime.statistics import EngineLoad

LOAD_HEADER: Final = b"endpoint-load-metrics"
"""Header of an answer with the load, as ORCA (Open Request Cost Aggregation) has it."""

LOAD_HEADER_FORMAT: Final = b"endpoint-load-metrics-format"
"""Header of a request that asks for the other one, and names its format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLoad:
    """Load of all models of one server."""

    running: int
    """Requests in flight with an input on a device."""
    queued: int
    """All other requests in flight."""
    requests_per_second: float
    """Answered requests a second, of the last seconds."""
    utilization: float
    """Mean part of the slots that was taken of late, in the lane with most; 0 to 1."""
    fullness: float
    """Used part of the limit of admission that is nearest, of the model with most; 0 to 1."""
    models: Mapping[str, EngineLoad]

    @staticmethod
    def of(models: Mapping[str, EngineLoad]) -> ServerLoad:
        """Sum up the loads of models, by name; there may be none."""
        loads = models.values()
        return ServerLoad(
            running=sum(load.running for load in loads),
            queued=sum(max(0, load.requests - load.running) for load in loads),
            requests_per_second=sum(load.requests_per_second for load in loads),
            utilization=max((lane.utilization for load in loads for lane in load.lanes.values()), default=0.0),
            fullness=max((load.fullness for load in loads), default=0.0),
            models=models,
        )

    def report(self) -> dict[str, object]:
        """Return the JSON of `/load`; `server_load` is vLLM's name for the requests in flight."""
        lanes = {
            name: {
                lane: {"drain_s": round(each.drain_s, 3), "utilization": round(each.utilization, 3)}
                for lane, each in load.lanes.items()
            }
            for name, load in self.models.items()
        }
        return {
            "server_load": self.running + self.queued,
            "running": self.running,
            "queued": self.queued,
            "requests_per_second": round(self.requests_per_second, 3),
            "utilization": round(self.utilization, 3),
            "fullness": round(self.fullness, 3),
            "lanes": lanes,
        }

    def header(self, wanted: bytes) -> bytes | None:
        """Return the value of `LOAD_HEADER` in a format, JSON or TEXT; None for any other."""
        rate, used = round(self.requests_per_second, 3), round(self.utilization, 3)
        match wanted.strip().upper():
            case b"JSON":
                named = {"num_requests_waiting": self.queued}
                report = {"rps_fractional": rate, "application_utilization": used, "named_metrics": named}
                return b"JSON " + msgspec.json.encode(report)
            case b"TEXT":
                text = f"rps_fractional={rate},application_utilization={used}"
                return f"TEXT {text},named_metrics.num_requests_waiting={self.queued}".encode()
        return None


class LoadCollector(Collector):
    """Gauges of the load, without labels: pickers of endpoints read one series of each name.

    Args:
        load: Returns the load of the server.
    """

    def __init__(self, load: Callable[[], ServerLoad]) -> None:
        self._load = load

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges under our names, and three under those of vLLM."""
        load = self._load()
        waiting, running = "Requests in flight without an input on a device", "Requests with an input on a device"
        full = "Used part of the nearest limit of admission, 0 to 1"
        for name, about, value in (
            ("staged_pool_num_requests_waiting", waiting, load.queued),
            ("staged_pool_num_requests_running", running, load.running),
            ("staged_pool_fullness", full, load.fullness),
            ("staged_pool_utilization", "Taken part of the device's slots in the last seconds", load.utilization),
            ("staged_pool_requests_per_second", "Answered requests a second", load.requests_per_second),
            ("vllm:num_requests_waiting", f"{waiting}, under vLLM's name", load.queued),
            ("vllm:num_requests_running", f"{running}, under vLLM's name", load.running),
            ("vllm:kv_cache_usage_perc", f"{full}: a pooling model has no KV cache", load.fullness),
        ):
            yield GaugeMetricFamily(name, about, value=value)

    def describe(self) -> Iterable[Metric]:
        """Return nothing: Prometheus' client would otherwise collect at registration."""
        return ()
