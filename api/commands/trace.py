"""The commands `trace record` and `trace replay`: sizes of real requests, and the same load again."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from staged_pool.api.commands.bench_flags import (
    REPORT_OPTIONS,
    SERVER_OPTIONS,
    URL,
    check_outputs,
    check_speed,
    limits_of,
    seconds,
    seed_of,
    server_of,
    slo_of,
)
from staged_pool.api.commands.given import given_settings
from staged_pool.api.commands.options import SettingsCommand, setting_options
from staged_pool.api.commands.process import errors_in_flag_words
from staged_pool.api.commands.process_config import ProcessConfig
from staged_pool.runtime.machine.signals import first_interrupt_ignored
from staged_pool.stages import foreign_text
from staged_pool.stages.errors import ConfigError

if TYPE_CHECKING:
    from staged_pool.api.bench.bench import Settings

LOOK_EVERY_S: Final = 0.2
"""Seconds between two looks at a log that is followed."""

AFTER_LAST_S: Final = 0.001
"""Seconds from the last request of a trace to the end of its load."""


def _record(
    *, log: Path, output: Path, follow: bool, duration: float | None, limit: int | None, overwrite: bool
) -> None:
    from staged_pool.api.bench.access_log import LogReader

    with errors_in_flag_words():
        if duration is not None and not follow:
            raise ConfigError("--duration: only a log that is followed ends by time; add --follow")
        until = None if duration is None else time.monotonic() + seconds("duration", duration)
        if output.exists() and not overwrite:
            raise ConfigError(f"--output {output}: exists already; give another file, or --overwrite")
        reader = LogReader()
        try:
            for place, lines in enumerate(_chunks(log, follow=follow, until=until)):
                reader.read(lines if place or not lines else [foreign_text.unmarked(lines[0]), *lines[1:]])
                if limit is not None and len(reader.rows) >= limit:
                    break
        except KeyboardInterrupt:  # the lines so far count
            click.echo("stopped", err=True)
        except (OSError, foreign_text.BadText) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise ConfigError(f"LOG {log}: cannot be read: {reason}") from error
        if not reader.rows:
            hint = "; its lines must be JSON: `staged-pool serve --log-format json`" if reader.unreadable else ""
            raise ConfigError(f"LOG {log}: has no request.finished line of a request with inputs{hint}")
        try:
            output.write_bytes(b"".join(reader.trace(limit).lines()))
        except OSError as error:
            raise ConfigError(f"--output {output}: cannot be written: {error.strerror}") from error
    click.echo(f"{reader.summary()}; written to {output}", err=True)


def _chunks(log: Path, *, follow: bool, until: float | None) -> Iterator[list[bytes]]:
    """Yield whole lines of a log, some at a time; of the standard input for `-`.

    The first SIGINT does not end the standard input: the server before the pipe gets it, too, and still logs the end of
    its last requests.
    """
    if str(log) == "-":
        if follow:
            raise ConfigError("--follow: the standard input is followed anyway; leave the flag out")
        with first_interrupt_ignored():
            for line in sys.stdin.buffer:
                yield [line]
        return
    with log.open("rb") as file:
        rest = b""
        while True:
            data = file.read(2**20)
            *lines, rest = (rest + data).split(b"\n")
            yield lines
            if data:
                continue
            if not follow or (until is not None and time.monotonic() >= until):
                yield [rest]
                return
            time.sleep(LOOK_EVERY_S)


def _replay(**given: Any) -> None:
    with errors_in_flag_words():
        process = given_settings(click.get_current_context()).build(ProcessConfig)
        settings = _settings(given)
        check_outputs(given)

        from staged_pool.api.commands.bench_run import measure

        measure(settings, process.backend, json=given["json"], plots=given["plots"])


def _settings(given: dict[str, Any]) -> Settings:
    from staged_pool.api.bench.bench import Settings
    from staged_pool.api.bench.level import Plan
    from staged_pool.api.bench.sizes import ImageSize, Kind
    from staged_pool.api.bench.trace import read_trace
    from staged_pool.api.bench.workload import Inputs

    trace = read_trace(given["trace"]).replayed(check_speed(given["speed"]), given["limit"])
    kinds: list[Kind] = sorted({row.kind for row in trace.rows})
    address, target = server_of(given)
    return Settings(
        address=address,
        target=target,
        inputs=Inputs(mix={kind: 1 / len(kinds) for kind in kinds}, image_size=ImageSize(320, 240), documents=2),
        plan=Plan(
            times=[row.at_s for row in trace.rows],
            warmup_s=0.0,
            round_s=trace.seconds + AFTER_LAST_S,
            rounds=1,
            slo_s=slo_of(given),
        ),
        seed=seed_of(given),
        limits=limits_of(given),
        trace=trace,
    )


record: Final = click.Command(
    "record",
    callback=_record,
    params=[
        click.Argument(["log"], type=click.Path(path_type=Path, dir_okay=False, allow_dash=True)),
        click.Option(
            ["--output", "-o"], type=click.Path(path_type=Path, dir_okay=False), required=True, metavar="TRACE",
            help="File for the trace.",
        ),
        click.Option(["--overwrite"], is_flag=True, help="Replace a file that is there."),
        click.Option(["--follow"], is_flag=True, help="Go on reading as the log grows, until Ctrl-C."),
        click.Option(["--duration"], type=float, metavar="SECONDS", help="Follow the log for this long."),
        click.Option(["--limit"], type=click.IntRange(min=1), metavar="N", help="End after so many requests."),
    ],
    help="""Make a trace of a server's log: arrival times and sizes alone.

    LOG: a file of JSON lines, as `staged-pool serve` logs them, or - for the standard input. A trace has no contents,
    keys, ids, tenants, or names of models.
    """,
)  # fmt: skip

replay: Final = SettingsCommand(
    "replay",
    callback=_replay,
    params=[
        click.Argument(["trace"], type=click.Path(path_type=Path, dir_okay=False)),
        URL,
        click.Option(
            ["--speed"], type=float, default=1.0, metavar="X", help="Replay X times as fast. Default: 1."
        ),
        click.Option(["--limit"], type=click.IntRange(min=1), metavar="N", help="Replay only the first N requests."),
        *SERVER_OPTIONS,
        *REPORT_OPTIONS,
        *setting_options(ProcessConfig, ("backend",)),
    ],
    help="""Send made-up requests of the sizes and at the times of a trace.

    TRACE: a file that `staged-pool trace record` has made. URL: the server. The report and the exit codes are those of
    `staged-pool bench`.
    """,
)  # fmt: skip

trace: Final = click.Group(
    "trace",
    commands=[record, replay],
    help="Record the load of a server, as arrival times and sizes, and replay it.",
    no_args_is_help=True,
)
