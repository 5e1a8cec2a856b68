"""The Typer application of the measurements, and the options that its commands share."""

from __future__ import annotations

import math
import signal
import sys
from typing import Annotated

import typer

from perf.tools.servers import Backend, prepare_libraries
from perf.tools.texts import Shape
from staged_pool.runtime.config import DType

Model = Annotated[str | None, typer.Option(help="Folder or hub id. Default: the server's own default.")]
DTypeOption = Annotated[DType, typer.Option("--dtype", help="Data type of the weights, for all contenders.")]
TorchThreads = Annotated[int | None, typer.Option(help="Threads of one forward, for all contenders.")]
BackendOption = Annotated[Backend, typer.Option("--backend", help="Event loop of the server.")]
Load = Annotated[Shape, typer.Option("--load", help="s1: 1 short text; m8: 8 of 64 tokens; x64: 64 mixed; day: mixed.")]

main = typer.Typer(
    help="Measure the server and the library on this machine. Every command starts its servers on free ports of "
    "127.0.0.1, stops them, prints a table and writes perf/results/COMMAND.json.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@main.callback()
def _prepare() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that servers are stopped
    prepare_libraries()


def factors_of(levels: str) -> list[float]:
    try:
        factors = [float(level) for level in levels.split(",")]
    except ValueError:
        factors = []
    if not factors or not all(0 < factor < math.inf for factor in factors):
        raise typer.BadParameter(f"{levels!r}: expected comma-separated numbers above 0")
    return factors
