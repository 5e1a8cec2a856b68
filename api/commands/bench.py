"""The command `bench`: load on a server, and its latencies, goodput and knee."""

from __future__ import annotations

from typing import Any, Final

import click

from staged_pool.api.commands.bench_flags import (
    INPUT_OPTIONS,
    LOAD_OPTIONS,
    REPORT_OPTIONS,
    SERVER_OPTIONS,
    URL,
    bench_settings,
    check_outputs,
)
from staged_pool.api.commands.given import given_settings
from staged_pool.api.commands.options import SettingsCommand, setting_options
from staged_pool.api.commands.process import errors_in_flag_words
from staged_pool.api.commands.process_config import ProcessConfig


def _bench(**given: Any) -> None:
    with errors_in_flag_words():
        process = given_settings(click.get_current_context()).build(ProcessConfig)
        settings = bench_settings(given)
        check_outputs(given)

        from staged_pool.api.commands.bench_run import measure

        measure(settings, process.backend, json=given["json"], plots=given["plots"])


bench: Final = SettingsCommand(
    "bench",
    callback=_bench,
    params=[
        URL,
        *LOAD_OPTIONS,
        *INPUT_OPTIONS,
        *SERVER_OPTIONS,
        *REPORT_OPTIONS,
        *setting_options(ProcessConfig, ("backend",)),
    ],
    help="""Put a server under load, and print its latencies and rates.

    URL: a server with OpenAI's routes, such as http://127.0.0.1:8000. Latencies count from the time at which a request
    was due. Exit code: 0 if all is well, 1 if requests failed (429 is no failure), 2 if a flag is wrong or the server
    cannot be measured, 3 if the generator was too slow, 130 if a signal stopped it.
    """,
)
