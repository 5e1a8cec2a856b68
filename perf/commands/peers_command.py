"""The command that compares other servers with this one."""

from __future__ import annotations

from typing import Annotated

import typer

from perf.commands.command_line import Model, factors_of, main
from perf.peers import run as peers
from perf.peers.catalogue import chosen
from perf.peers.inputs import SCENARIOS, some_of
from perf.peers.kept import OtherSettings


@main.command("peers")
def peers_command(
    *,
    model: Model = None,
    only: Annotated[str | None, typer.Option(help="Comma-separated servers; staged-pool is always included.")] = None,
    rounds: Annotated[
        int, typer.Option(min=0, help="Rounds; each starts every server anew. 0, with --go-on: only the tables.")
    ] = 5,
    seconds: Annotated[float, typer.Option(min=1, help="Seconds of one cell; then it waits for answers.")] = 10.0,
    levels: Annotated[
        str, typer.Option(help="Rates of the open loop as multiples of a server's best rate, or: none.")
    ] = "0.7,2",
    scenarios: Annotated[
        str | None, typer.Option(help=f"Comma-separated scenarios: {', '.join(SCENARIOS)}. Default: all.")
    ] = None,
    quick: Annotated[bool, typer.Option(help="One round with few cells of 2 s, as a check.")] = False,
    go_on: Annotated[bool, typer.Option(help="Include the rounds that were measured before.")] = False,
    float32: Annotated[bool, typer.Option(help="Compare all in float32, too, if bfloat16 is their best.")] = True,
    neighbour: Annotated[
        bool, typer.Option("--neighbour", help="Run a busy loop on each core. Results: peers-neighbour.*")
    ] = False,
) -> None:
    """Compare other servers with this one; builds an environment for each in .peers/, takes hours for all."""
    try:
        contenders, asked = chosen(only), some_of(scenarios)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if not rounds and not go_on:
        raise typer.BadParameter("--rounds 0 needs --go-on")
    factors = [] if levels == "none" else factors_of(levels)
    try:
        peers.run(
            model,
            peers=contenders,
            rounds=rounds,
            seconds=seconds,
            levels=factors,
            scenarios=asked,
            quick=quick,
            go_on=go_on,
            float32=float32,
            neighbour=neighbour,
        )
    except OtherSettings as error:
        raise typer.BadParameter(str(error), param_hint="--go-on") from None
