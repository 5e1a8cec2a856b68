"""Time from the start of a server's process to its first vector.

After the first start, its files are in the page cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from perf.tools import report
from perf.tools.client import Connection, post, successful
from perf.tools.servers import START_TIMEOUT_S, Options, Server, serving
from perf.tools.texts import embeddings_body

TARGETS_S: Final = {"listening": 1.0, "first vector": 8.0}


def run(options: Options, *, starts: int) -> None:
    """Measure, print and record wall-clock times, the start of the interpreter included."""
    times_s: dict[str, list[float]] = {name: [] for name in _MILESTONES}
    with report.recording("coldstart", {"options": options, "starts": starts}) as record:
        with report.progress("coldstart", starts) as bar:
            for _ in range(starts):
                with serving(options.serve_command(coalesce=True)) as server:
                    for name, reach in _MILESTONES.items():
                        reach(server)
                        times_s[name].append(server.age_s())
                    record.results["model"] = server.card()
                bar.advance(bar.task_ids[0])
        summaries = {name: report.Summary.of(values) for name, values in times_s.items()}
        report.show_table(
            "From exec to (s)",
            ["", "median", "max", "starts"],
            [[name, f"{s.p50:.2f}", f"{s.max:.2f}", str(s.samples)] for name, s in summaries.items() if s],
        )
        record.results["seconds"] = times_s
        for name, limit_s in TARGETS_S.items():
            record.show_target(f"{name}, slowest", max(times_s[name]), limit_s, "s")


def _embed(server: Server) -> None:
    connection = Connection(server.port, timeout_s=START_TIMEOUT_S)
    successful(connection.exchange(post("/v1/embeddings", embeddings_body(["the first of all texts"]))))
    connection.close()


_MILESTONES: Final[dict[str, Callable[[Server], object]]] = {
    "listening": Server.wait_listening,
    "/health 200": lambda server: server.wait_ok("/health"),
    "/ready 200": lambda server: server.wait_ok("/ready"),
    "first vector": _embed,
}
