"""Run of a measurement by a command: progress, signals, the table, files and the exit code."""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import anyio
import click
import orjson
from rich.console import Console

from staged_pool.api.bench.bench import Bench, Settings
from staged_pool.api.bench.plots import draw
from staged_pool.api.bench.progress import show_progress
from staged_pool.api.bench.table import failures, render
from staged_pool.api.commands.process import run
from staged_pool.api.commands.process_config import Backend
from staged_pool.runtime.machine.signals import interrupts
from staged_pool.stages.errors import StagedPoolError
from staged_pool.stages.exception_groups import single_errors

EXIT_FAILED: Final = 1
"""Exit code if requests failed. Rejections (429) are no failures."""

EXIT_GENERATOR: Final = 3
"""Exit code if the generator was too slow for its load."""

EXIT_INTERRUPTED: Final = 130


def measure(settings: Settings, backend: Backend, *, json: Path | None, plots: Path | None) -> None:
    """Run a measurement, print its table, and end with its exit code.

    Raises:
        ConfigError: The server cannot be measured.
        StagedPoolError: A file cannot be written.
    """
    bench: list[Bench] = []

    async def program() -> None:
        bench.append(Bench(settings))
        gc.collect()
        gc.freeze()  # else each collection during the load looks through all that the imports have made
        with single_errors():
            await _run(bench[0])

    run(backend, program)
    report = bench[0].report()
    if not report["levels"]:
        click.echo("stopped before the load began: nothing was measured", err=True)
        raise click.exceptions.Exit(EXIT_INTERRUPTED)
    sys.stdout.write(render(report))
    sys.stdout.flush()
    try:
        if json is not None:
            json.write_bytes(orjson.dumps(report, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
        if plots is not None:
            draw(report, plots)
    except OSError as error:
        raise StagedPoolError(f"{error.filename}: cannot be written: {error.strerror}") from error
    if code := exit_code(report):
        raise click.exceptions.Exit(code)


def exit_code(report: Mapping[str, Any]) -> int:
    """Return the exit code of a report."""
    levels = report["levels"]
    if report["interrupted"]:
        return EXIT_INTERRUPTED
    if any(level["generator"]["is_bottleneck"] for level in levels):
        return EXIT_GENERATOR
    return EXIT_FAILED if failures(report) else 0


async def _run(bench: Bench) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_stop_on_signal, bench)
        tasks.start_soon(show_progress, bench, Console(stderr=True))
        await bench.run()
        tasks.cancel_scope.cancel()


async def _stop_on_signal(bench: Bench) -> None:
    with interrupts() as signals:
        async for _ in signals:
            bench.stop()
