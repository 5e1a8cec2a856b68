"""`python -m tests.hostile`: a table of attacks, with the latencies of a bystander and a probe."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from tests.hostile.attack import all_attacks
from tests.hostile.running import Outcome, outcomes

HEAD = f"{'attack':44} {'client ms':>14} {'probe ms':>14} {'errors':>7} {'RSS MB':>12}  seen by the attacker"


def main(
    only: Annotated[str, typer.Option(help="Part of the names of attacks. Default: all.")] = "",
    seconds: Annotated[float, typer.Option(help="Of each attack, and of the calm before it.")] = 10.0,
    slack: Annotated[float, typer.Option(help="Seconds beyond 3 times the calm p99.")] = 0.02,
) -> None:
    """Attack a real server, and fail if a bystander notices."""
    chosen = [each for each in all_attacks() if only in each.name]
    typer.echo(HEAD)
    faults: dict[str, list[str]] = {}
    for outcome in outcomes(chosen, seconds):
        typer.echo(_row(outcome))
        if found := outcome.faults(slack):
            faults[outcome.attack.name] = found
    for name, found in faults.items():
        typer.echo(f"{name}: {len(found)} faults: {'; '.join(found[:5])}")
    sys.exit(bool(faults) or not chosen)


def _row(outcome: Outcome) -> str:
    calm, now = outcome.calm, outcome.under_attack
    cells = [
        f"{outcome.attack.name:44}",
        f"{calm.client.p99_s * 1e3:6.1f}->{now.client.p99_s * 1e3:6.1f}",
        f"{calm.probe.p99_s * 1e3:6.1f}->{now.probe.p99_s * 1e3:6.1f}",
        f"{len(now.errors):7}",
        f"{outcome.resident_bytes / 1e6:5.0f}->{outcome.peak_bytes / 1e6:5.0f}",
        f" {outcome.fault or dict(outcome.seen)}",
    ]
    return " ".join(cells)


if __name__ == "__main__":
    typer.run(main)
