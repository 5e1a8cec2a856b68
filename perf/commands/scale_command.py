"""The command of the cost model: rates of a hundred thousand texts a second, on paper and in virtual time."""

from __future__ import annotations

from typing import Annotated

import typer

from perf.commands.command_line import BackendOption, DTypeOption, Model, TorchThreads, main
from perf.scale import check, measure, tables
from perf.scale.costs import NotMeasured
from perf.tools.servers import Options


@main.command("scale")
def scale_command(
    *,
    model: Model = None,
    dtype: DTypeOption = "auto",
    torch_threads: TorchThreads = None,
    backend: BackendOption = "asyncio",
    measures: Annotated[
        bool, typer.Option("--measure", help="Measure the unit costs on this machine: about two minutes.")
    ] = False,
    checks: Annotated[
        bool,
        typer.Option("--check", help="Compare predictions with real servers on this machine: about three minutes."),
    ] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each load of --measure.")] = 3,
    seconds: Annotated[float, typer.Option(min=0.5, help="Seconds of one load of --measure and --check.")] = 2.0,
    aim: Annotated[
        float, typer.Option(min=0.05, max=0.95, help="Largest part of the time that a loop or a device is busy.")
    ] = 0.6,
    slower: Annotated[
        float, typer.Option(min=0.1, max=10, help="Times that a core of the target machine takes as long.")
    ] = 1.0,
) -> None:
    """Fronts, engine processes, devices and bytes for up to a million texts a second."""
    options = Options(model=model, dtype=dtype, torch_threads=torch_threads, backend=backend)
    if measures:
        measure.measure(options, rounds=rounds, seconds=seconds)
    try:
        if checks:
            check.check(options, seconds=seconds)
        if not (measures or checks):
            tables.show(aim=aim, slower=slower)
    except NotMeasured as error:
        raise typer.BadParameter(str(error)) from None
