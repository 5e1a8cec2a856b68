"""Command that runs gateways in front of replicas."""

from __future__ import annotations

from typing import Annotated

import typer

from perf.commands.command_line import main
from perf.gateways import run as gateways
from perf.gateways.gateway import GATEWAYS


@main.command("gateways")
def gateways_command(
    *,
    names: Annotated[str, typer.Option("--gateways", help="Comma-separated, of envoy, haproxy and nginx.")] = ",".join(
        GATEWAYS
    ),
    requests: Annotated[int, typer.Option(min=100, help="Requests of the steady load of each gateway.")] = 30_000,
    overload_s: Annotated[float, typer.Option("--overload", min=0, help="Seconds at twice the capacity.")] = 10.0,
) -> None:
    """Envoy, HAProxy and nginx before three replicas that die, drain and restart: failed requests, wrong vectors."""
    chosen = names.split(",")
    if unknown := sorted({*chosen} - {*GATEWAYS}):
        raise typer.BadParameter(f"{', '.join(unknown)}: expected some of {', '.join(GATEWAYS)}")
    gateways.run(chosen, requests=requests, overload_s=overload_s)
