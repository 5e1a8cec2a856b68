"""Tables of a report for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from staged_pool.api.bench.statistics import LEAST_SAMPLES

Report = Mapping[str, Any]

_NONE: Final = "-"


def render(report: Report) -> str:
    """Return the text of a report: a head, a table with a line for each level, and notes."""
    levels: Sequence[Report] = report["levels"]
    lines = [*_head(report)]
    if levels:
        lines += ["", *_table(report, levels)]
        if len(levels) == 1:
            lines += ["", *_details(levels[0])]
        lines += _notes(report, levels)
    return "\n".join(lines) + "\n"


def _head(report: Report) -> Iterator[str]:
    model = report["model"] or "the server's choice"
    yield f"server   {report['url']}, model {model}"
    yield f"load     {report['inputs']}; seed {report['seed']}"
    for kind, rate in report["tokens_per_word"].items():
        yield f"tokens   {rate['per_word']:.2f} a word of {kind} ({rate['source']})"
    rounds = f"warm-up {report['warmup_s']:g} s, rounds of {report['round_s']:g} s"
    slo = "" if report["slo_s"] is None else f"; good answers take at most {report['slo_s']:g} s"
    yield f"times    {rounds}{slo}"


def _table(report: Report, levels: Sequence[Report]) -> Iterator[str]:
    has_slo = report["slo_s"] is not None
    titles = ["load", "answers/s", *(["good/s"] if has_slo else []), "rejected", "failed", "p50 ms", "p90 ms", "p99 ms"]
    rows = [titles]
    for level in levels:
        counts, rates, latency = level["requests"], level["rates"], level["latency_ms"]
        p50 = latency["p50_rounds"]
        rows.append([
            level["plan"],
            spread(rates["answered"]),
            *([spread(rates["goodput"])] if has_slo else []),
            str(counts["rejected"]),
            str(counts["failed"] + counts["not_sent"]),
            spread(p50) if p50 else number(latency["p50"]),
            number(latency["p90"]),
            spread(latency["p99"]) if latency["p99"] else _NONE,
        ])  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        first, *others = row
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))]
        yield "  ".join(cells).rstrip()


def _details(level: Report) -> Iterator[str]:
    rates, counts = level["rates"], level["requests"]
    yield f"requests     {counts['due']:,} due, {counts['answered']:,} answered" + (
        f", {counts['late']:,} of them late" if counts["late"] else ""
    )
    tokens = "" if rates["tokens"] is None else f", tokens/s {spread(rates['tokens'])}"
    yield f"items/s      {spread(rates['items'])}{tokens}"
    for kind, numbers in level["kinds"].items():
        latency = numbers["latency_ms"]
        p99 = spread(latency["p99"]) if latency["p99"] else _NONE
        yield f"{kind:<12} p50 {number(latency['p50'])} ms, p99 {p99} ms, {latency['samples']:,} answers"
    if level["stages_ms"]:
        yield "stages       " + ", ".join(f"{name} {number(ms)}" for name, ms in level["stages_ms"].items()) + " ms"
    if (server := level["server"]) and server["batches"]:
        joined = f", {server['coalesced_items']:,} joined to equal ones" if server["coalesced_items"] else ""
        yield f"batches      {server['batches']:,} of {server['items_per_batch']:g} items{joined}"
    made = level["generator"]
    yield (
        f"generator    late by {number(made['lateness_p50_ms'])} ms (p99 {number(made['lateness_p99_ms'])} ms), "
        f"{number(made['cpu_ms_per_request'])} ms of CPU a request, {made['connections']} connections"
    )


def _notes(report: Report, levels: Sequence[Report]) -> Iterator[str]:
    yield ""
    yield "Numbers in brackets are the range over the rounds; those of the p99, a 95 % interval (bootstrap)."
    few = [level for level in levels if level["latency_ms"]["p99"] is None]
    if few:
        most = max(level["latency_ms"]["samples"] for level in few)
        yield (
            f"No p99 where there are fewer than {LEAST_SAMPLES:,} answers (here at most {most:,}): give a longer "
            "--duration or more --rounds."
        )
    if any(rate["source"] == "assumed" for rate in report["tokens_per_word"].values()):
        yield "The server does not say how it counts tokens; a token a word is assumed."
    if failed := failures(report):
        kinds = ", ".join(f"{count:,} x {outcome}" for outcome, count in failed.items())
        yield f"Failed requests, those of the warm-up included: {kinds}."
    if "not sent" in failed:
        yield "Those not sent were more than --max-connections at once."
    if (found := report["knee"]) is not None:
        held = "no rate that was tried" if found["held"] is None else f"{found['held']:g} requests/s"
        yield f"Knee: the server keeps up with {held}, and not with {found['over']:g} requests/s."
    late = [level for level in levels if level["generator"]["is_bottleneck"]]
    if late:
        where = "" if len(levels) == 1 else f" at {', '.join(level['plan'] for level in late)}"
        yield (
            f"The generator is the bottleneck{where}: it was late by "
            f"{number(late[-1]['generator']['lateness_p99_ms'])} ms (p99). Lower the load, or run it elsewhere."
        )
    if report["interrupted"]:
        yield "The measurement was stopped before its end; these are the numbers so far."


def failures(report: Report) -> dict[str, int]:
    """Return the number of failed requests of all loads by outcome: neither answered nor rejected."""
    fine = ("200", "429", "unfinished")
    return {outcome: count for outcome, count in report["outcomes"].items() if outcome not in fine}


def spread(value: Report | None) -> str:
    """Write a value with its range, without the range where there is none."""
    if value is None:
        return _NONE
    if value["low"] == value["high"]:
        return number(value["value"])
    return f"{number(value['value'])} [{number(value['low'])}-{number(value['high'])}]"


def number(value: float | None) -> str:
    """Write a number with three digits, or a dash for none."""
    if value is None:
        return _NONE
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"
