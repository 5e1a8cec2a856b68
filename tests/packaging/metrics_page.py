"""The tables in docs/metrics.md, made of the answer of a real server.

`python -m tests.packaging.metrics_page` writes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import anyio
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.statistics import ReplicaStatistics
from tests.servers.in_memory import serving_in_memory
from tests.support.cards import BOTH_LANES
from tests.support.model import LetterModel

PAGE: Final = Path(__file__).parents[2] / "docs" / "metrics.md"

BEGIN: Final = "<!-- metrics: written by `python -m tests.packaging.metrics_page` -->\n"
END: Final = "<!-- end of metrics -->\n"

_GROUPS: Final = {
    "staged_pool_stage": "Stages",
    "staged_pool_batch": "Batches and devices",
    "staged_pool_device": "Batches and devices",
    "staged_pool_holds": "Batches and devices",
    "staged_pool_coalesced": "Batches and devices",
    "staged_pool_stalled": "Batches and devices",
    "staged_pool_limiter": "Limits",
    "staged_pool_fetch": "Limits",
    "staged_pool_preprocess": "Limits",
    "staged_pool_admi": "Admission",
    "staged_pool_refused": "Admission",
    "staged_pool_retry": "Admission",
    "staged_pool_lane": "Admission",
    "staged_pool_priority": "Admission",
    "staged_pool_tenants": "Admission",
    "staged_pool_http": "HTTP",
    "staged_pool_request": "Requests",
    "staged_pool_cancelled": "Requests",
    "staged_pool_expired": "Requests",
    "staged_pool_reader": "HTTP",
    "staged_pool_connections": "HTTP",
    "staged_pool_live": "HTTP",
    "staged_pool_image_cache": "Caches",
    "staged_pool_result_cache": "Caches",
    "process": "Process",
}
"""Groups by the start of the name; everything else is `Server`."""

_ORDER: Final = (
    "Stages", "Batches and devices", "Admission", "Requests", "HTTP", "Limits", "Caches", "Server", "Process",
)  # fmt: skip


def group_of(name: str) -> str:
    """Return the group of a metric."""
    return next((group for start, group in _GROUPS.items() if name.startswith(start)), "Server")


class OnDevice(LetterModel):
    """The model double on a device that counts its work."""

    @property
    def devices(self) -> Sequence[ReplicaStatistics]:
        return [ReplicaStatistics(device="cpu", running=0, batches=1, tokens=1, busy_s=1.0)]


async def families() -> Sequence[Metric]:
    """Return the metrics of a server with images and caches."""
    model = OnDevice(card=BOTH_LANES)
    async with serving_in_memory(model, engine=EngineConfig(result_cache_mb=1)) as served, served.client() as client:
        await client.post("/v1/embeddings", json={"input": "a"})
        text = (await client.get("/metrics")).text
    return [family for family in text_string_to_metric_families(text) if not family.name.startswith("vllm:")]


def table(found: Sequence[Metric]) -> str:
    """Return the tables of all metrics, by group."""
    groups: dict[str, list[str]] = {}
    for family in sorted(found, key=lambda family: family.name):
        labels = sorted({label for sample in family.samples for label in sample.labels} - {"le"})
        name = f"{family.name}_total" if family.type == "counter" else family.name
        row = f"| `{name}` | {family.type} | {', '.join(labels)} | {family.documentation} |"
        groups.setdefault(group_of(family.name), []).append(row)
    head = "| metric | type | labels | |\n|---|---|---|---|\n"
    return "\n".join(f"### {group}\n\n{head}" + "\n".join(groups[group]) + "\n" for group in _ORDER if group in groups)


def page(text: str, found: Sequence[Metric]) -> str:
    """Return the text of the page with the present tables."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{table(found)}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(), anyio.run(families)))
