"""Latency of `/health` by the size limit of JSON decoded on the event loop."""

from __future__ import annotations

import json
import random
import sys
from contextlib import ExitStack
from functools import partial
from statistics import median
from typing import Final

from perf.tools import report
from perf.tools.client import post
from perf.tools.load import HealthProbe, Load, LoadGenerator, LoadOutcome, ProbeOutcome
from perf.tools.report import number
from perf.tools.servers import Options, Server, serving
from perf.tools.workers import Worker, worker

INLINE_BYTES: Final = (3_277, 32_768, 327_680)
"""Sizes up to which bodies are decoded on the event loop: a tenth of the default, the default, ten times it."""
BODY_BYTES: Final = (16_000, 250_000)
"""Approximate sizes of bodies, each between two of these limits."""
CLIENTS: Final = 16
KEPT_TOKENS: Final = 8
"""Token ids of a body that are kept, so that decoding dominates the forward."""
REQUESTS: Final = 8
PATIENCE_S: Final = 10.0

# There is no setting for this size: these servers change the default of an argument.
_SERVE: Final = """
import sys
from staged_pool.stages.parse import ParseStage
ParseStage.__init__.__kwdefaults__["inline_bytes"] = int(sys.argv.pop(1))
from staged_pool.api.commands.cli import main
main()
"""


def run(options: Options, *, rounds: int, seconds: float) -> None:
    """Measure, print and record. The servers, one for each size, alternate; the others are idle."""
    settings = {"options": options, "rounds": rounds, "seconds": seconds, "clients": CLIENTS}
    with report.recording("parsing", settings) as record, ExitStack() as running:
        servers = {size: started(running, options, size) for size in INLINE_BYTES}
        loads = {
            (body, size): running.enter_context(worker(partial(LoadGenerator, server.port, requests(body))))
            for body in BODY_BYTES
            for size, server in servers.items()
        }
        probes = {
            size: running.enter_context(worker(partial(HealthProbe, server.port))) for size, server in servers.items()
        }
        rates: dict[tuple[int, int], list[float]] = {cell: [] for cell in loads}
        health = {cell: ProbeOutcome() for cell in loads}
        with report.progress("parsing", rounds * len(loads)) as bar:
            for generate in loads.values():
                generate(Load(clients=CLIENTS, max_requests=2 * CLIENTS))
            for place in range(rounds):
                for cell in list(loads)[:: -1 if place % 2 else 1]:
                    rates[cell].append(_cell(loads[cell], probes[cell[1]], health[cell], seconds))
                    bar.advance(bar.task_ids[0])
        rows = []
        for (body, size), outcome in health.items():
            summary, rate = report.Summary.of(outcome.latencies_ms), median(rates[body, size])
            record.results[f"bodies of {body} bytes, on the event loop up to {size}"] = {
                "requests_per_s": rates[body, size], "health_ms": summary, "health_timeouts": outcome.timeouts,
            }  # fmt: skip
            rows.append(
                [f"{number(body / 1e3)} kB, {number(size / 1e3)} kB", number(rate), *report.Summary.cells(summary)]
            )
        columns = ["body, on the event loop up to", "requests/s", "health p50", "p99", "max", "n"]
        report.show_table("While JSON is read (ms)", columns, rows)


def started(running: ExitStack, options: Options, inline_bytes: int) -> Server:
    """Start a server that decodes bodies up to a size on the event loop; it ends with `running`."""
    command = [sys.executable, "-c", _SERVE, str(inline_bytes), *options.serve_arguments()]
    server = running.enter_context(serving(command))
    server.card()  # one after the other: loading is work too
    return server


def requests(body_bytes: int) -> tuple[bytes, ...]:
    """Return requests with bodies of about this size; token ids are the slowest JSON for its size."""
    rng = random.Random(0)
    return tuple(
        post(
            "/v1/embeddings",
            json.dumps(
                {
                    "input": [rng.randrange(2000, 10_000) for _ in range(body_bytes // 6)],
                    "truncate_prompt_tokens": KEPT_TOKENS,
                    "encoding_format": "base64",
                }
            ).encode(),
        )
        for _ in range(REQUESTS)
    )


def _cell(
    generate: Worker[Load, LoadOutcome], probe: Worker[float, ProbeOutcome], health: ProbeOutcome, seconds: float
) -> float:
    """Run one load with health checks; return the answers a second."""
    generate.begin(Load(clients=CLIENTS, seconds=seconds, patience_s=PATIENCE_S))
    health.add(probe(seconds))
    return generate.end().rate
