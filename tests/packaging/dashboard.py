"""The dashboard in deploy/grafana: `python -m tests.packaging.dashboard` writes it.

It needs `grafana-foundation-sdk`, Grafana's own builder of dashboards.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

FILE: Final = Path(__file__).parents[2] / "deploy" / "grafana" / "staged-pool.json"

CHOSEN: Final = '{instance=~"$instance", model=~"$model"'
"""Labels of each metric of a model, left open for more."""
HERE: Final = '{instance=~"$instance"'


class Panel(NamedTuple):
    """One panel: title, unit, explanation, and queries with the names of their lines."""

    title: str
    unit: str
    about: str
    queries: Sequence[tuple[str, str]]
    width: int = 8


def _rate(metric: str, by: str, more: str = "", labels: str = CHOSEN) -> str:
    return f"sum by ({by}) (rate({metric}{labels}{more}}}[$__rate_interval]))"


def _quantile(part: float, metric: str, by: str = "", labels: str = CHOSEN) -> str:
    grouped = f"{by}, le" if by else "le"
    return f"histogram_quantile({part}, {_rate(f'{metric}_bucket', grouped, labels=labels)})"


def _of_workers(metric: str) -> str:
    workers = f"sum by (stage) (staged_pool_stage_workers{CHOSEN}}})"
    return f"{_rate(metric, 'stage')} / {workers}"


PANELS: Final[Sequence[tuple[str, Sequence[Panel]]]] = (
    (
        "Where is the bottleneck?",
        (
            Panel(
                "Busy workers, by stage",
                "percentunit",
                "The bottleneck is the last stage above 85 % while items wait for it.",
                ((_of_workers("staged_pool_stage_busy_seconds_total"), "{{stage}}"),),
            ),
            Panel(
                "Blocked workers, by stage",
                "percentunit",
                "Time in which workers wait for the stage behind them.",
                ((_of_workers("staged_pool_stage_blocked_seconds_total"), "{{stage}}"),),
            ),
            Panel(
                "Mean wait, by stage",
                "s",
                "Mean time of items in front of each stage.",
                (
                    (
                        f"{_rate('staged_pool_stage_wait_seconds_sum', 'stage')}"
                        f" / {_rate('staged_pool_stage_wait_seconds_count', 'stage')}",
                        "{{stage}}",
                    ),
                ),
            ),
            Panel(
                "Waiting items, by stage",
                "short",
                "Items in front of each stage.",
                ((f"sum by (stage) (staged_pool_stage_waiting_items{CHOSEN}}})", "{{stage}}"),),
            ),
            Panel(
                "Oldest request, by stage",
                "s",
                "Time since the last progress of the request that has made none for longest.",
                ((f"max by (stage) (staged_pool_stage_oldest_seconds{CHOSEN}}})", "{{stage}}"),),
            ),
            Panel(
                "Limits on calls",
                "percentunit",
                "Used part of the threads and fetches.",
                (
                    (
                        f"sum by (limiter) (staged_pool_limiter_used{CHOSEN}}})"
                        f" / sum by (limiter) (staged_pool_limiter_slots{CHOSEN}}})",
                        "{{limiter}}",
                    ),
                ),
            ),
        ),
    ),
    (
        "Requests",
        (
            Panel(
                "HTTP requests, by status",
                "reqps",
                "499 is a client that left.",
                ((_rate("staged_pool_http_requests_total", "status", labels=HERE), "{{status}}"),),
            ),
            Panel(
                "Latency of answered requests",
                "s",
                "From admission to the answer.",
                tuple(
                    (_quantile(part, "staged_pool_request_duration_seconds"), name)
                    for part, name in ((0.5, "p50"), (0.95, "p95"), (0.99, "p99"))
                ),
            ),
            Panel(
                "Rejected requests, by reason",
                "reqps",
                "Answered 429 with Retry-After.",
                ((_rate("staged_pool_refused_total", "reason"), "{{reason}}"),),
            ),
            Panel(
                "Use of the limits of admission",
                "percentunit",
                "Requests, items, tokens and bytes in flight.",
                (
                    (
                        f"max by (unit) (staged_pool_admission_inside{CHOSEN}}}"
                        f" / staged_pool_admission_limit{CHOSEN}}})",
                        "{{unit}}",
                    ),
                ),
            ),
            Panel(
                "Items and tokens a second",
                "short",
                "Of answered requests.",
                (
                    (_rate("staged_pool_request_items_sum", "route"), "items {{route}}"),
                    (_rate("staged_pool_request_tokens_sum", "route"), "tokens {{route}}"),
                ),
            ),
            Panel(
                "Answers that clients are reading",
                "short",
                "Mean number of answers on their way: slow readers raise it.",
                ((_rate("staged_pool_reader_blocked_seconds_total", "instance", labels=HERE), "{{instance}}"),),
            ),
        ),
    ),
    (
        "Batches and devices",
        (
            Panel(
                "Device busy",
                "percentunit",
                "Time with at least one forward.",
                ((_rate("staged_pool_device_busy_seconds_total", "device"), "{{device}}"),),
            ),
            Panel(
                "Items of a batch",
                "short",
                "Half of the batches have at most p50.",
                tuple(
                    (_quantile(part, "staged_pool_batch_items", "lane"), f"{name} {{{{lane}}}}")
                    for part, name in ((0.5, "p50"), (0.95, "p95"))
                ),
            ),
            Panel(
                "Batches, by the reason for their size",
                "short",
                "`cost` and `size` are full batches.",
                ((_rate("staged_pool_batches_total", "trigger"), "{{trigger}}"),),
            ),
            Panel(
                "Held slots, by reason",
                "percentunit",
                "Time in which a free slot started nothing although items waited.",
                ((_rate("staged_pool_batch_hold_seconds_total", "reason"), "{{reason}}"),),
            ),
            Panel(
                "Tokens a second on the device",
                "short",
                "Without padding, and padding.",
                (
                    (_rate("staged_pool_device_tokens_total", "model"), "{{model}}"),
                    (_rate("staged_pool_device_padding_tokens_total", "model"), "padding {{model}}"),
                ),
            ),
            Panel(
                "Age of the running forward",
                "s",
                "It falls with each forward; a rising line is a device that hangs.",
                ((f"max by (model) (staged_pool_device_running_seconds{CHOSEN}}})", "{{model}}"),),
            ),
        ),
    ),
    (
        "Process",
        (
            Panel(
                "Event loop lag",
                "s",
                "Above 0.1 s, probes begin to wait.",
                ((_quantile(0.99, "staged_pool_event_loop_late_seconds", "instance", HERE), "{{instance}}"),),
            ),
            Panel(
                "Garbage collections",
                "percentunit",
                "Part of the time in which they stop all Python code.",
                ((_rate("staged_pool_gc_pause_seconds_sum", "instance", labels=HERE), "{{instance}}"),),
            ),
            Panel(
                "Memory",
                "bytes",
                "Resident memory, and the limit of the process.",
                (
                    (f"process_resident_memory_bytes{HERE}}}", "{{instance}}"),
                    (f"staged_pool_memory_limit_bytes{HERE}}}", "limit {{instance}}"),
                ),
            ),
        ),
    ),
)


def build() -> str:
    """Return the JSON of the dashboard."""
    from grafana_foundation_sdk.builders import dashboard, prometheus, timeseries
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models.dashboard import DataSourceRef

    source = DataSourceRef(type_val="prometheus", uid="$source")
    board = (
        dashboard.Dashboard("staged-pool")
        .uid("staged-pool")
        .tags(["staged-pool"])
        .refresh("10s")
        .time("now-30m", "now")
    )
    board = board.editable().timezone("browser")
    board = board.with_variable(dashboard.DatasourceVariable("source").label("Data source").type("prometheus"))
    for name in ("instance", "model"):
        board = board.with_variable(
            dashboard.QueryVariable(name)
            .label(name.capitalize())
            .datasource(source)
            .query(f"label_values(staged_pool_model_info, {name})")
            .multi(True)
            .include_all(True)
        )
    for title, panels in PANELS:
        board = board.with_row(dashboard.Row(title))
        for panel in panels:
            built = timeseries.Panel().title(panel.title).description(panel.about).unit(panel.unit).datasource(source)
            built = built.min(0).span(panel.width).height(8)
            for query, legend in panel.queries:
                built = built.with_target(prometheus.Dataquery().expr(query).legend_format(legend))
            board = board.with_panel(built)
    made: str = JSONEncoder(sort_keys=True, indent=2).encode(board.build())
    return made + "\n"


def queries(board: dict[str, Any]) -> list[str]:
    """Return all queries of a dashboard."""
    return [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]


def concrete(query: str) -> str:
    """Return a query without Grafana's variables: all instances and models, over one minute."""
    return re.sub(r"\$(instance|model)\b", ".*", query).replace("$__rate_interval", "1m")


if __name__ == "__main__":
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(build())
