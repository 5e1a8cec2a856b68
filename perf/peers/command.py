"""The command that compares other servers with this one."""

from __future__ import annotations

from typing import Annotated

import typer

from perf.command_line import Model, factors_of, main
from perf.peers import run as peers
from perf.peers.catalogue import chosen
from perf.peers.inputs import SCENARIOS, some_of
from perf.peers.kept import OtherSettings


@main.command("peers")
def peers_command(
    *,
    model: Model = None,
    only: Annotated[
        str | None, typer.Option(help="Names with commas between them; staged-pool is always among them.")
    ] = None,
    rounds: Annotated[
        int, typer.Option(min=0, help="Each starts every server anew, in turns. 0, with --go-on: only the tables.")
    ] = 5,
    seconds: Annotated[float, typer.Option(min=1, help="Of one cell; answers are then waited for.")] = 10.0,
    levels: Annotated[
        str, typer.Option(help="Multiples of the most that a server did, for the open loop, or: none.")
    ] = "0.7,2",
    scenarios: Annotated[
        str | None, typer.Option(help=f"Names with commas between them: {', '.join(SCENARIOS)}. Default: all.")
    ] = None,
    quick: Annotated[bool, typer.Option(help="One round, few cells of 2 s: to see that it works.")] = False,
    go_on: Annotated[bool, typer.Option(help="Have the rounds that were measured before in the tables, too.")] = False,
    float32: Annotated[
        bool, typer.Option(help="Compare all in float32 as well, where bfloat16 is what they are best at.")
    ] = True,
    neighbour: Annotated[
        bool, typer.Option("--neighbour", help="Beside a busy loop on each core. Results: peers-neighbour.*")
    ] = False,
) -> None:
    """Compare other servers with this one; builds an environment for each in .peers/, takes hours for all."""
    try:
        contenders, asked = chosen(only), some_of(scenarios)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if not rounds and not go_on:
        raise typer.BadParameter("--rounds 0 has nothing to show without --go-on")
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
