"""The command `run-batch`: answer a file of lines without a server, or by one that runs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from staged_pool.api.commands.batch_flags import Batch
from staged_pool.api.commands.batch_progress import print_summary, showing_progress
from staged_pool.api.commands.given import Given, given_settings
from staged_pool.api.commands.options import SettingsCommand, setting_options
from staged_pool.api.commands.process import errors_in_flag_words, prepare_environment, run
from staged_pool.api.commands.process_config import ProcessConfig
from staged_pool.api.config import ServerConfig
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.requests import HYPOTHESIS
from staged_pool.runtime.settings import ENV_PREFIX, settings_of
from staged_pool.stages.errors import ConfigError, InvalidInput, StagedPoolError, Unsupported

if TYPE_CHECKING:
    from staged_pool.api.commands.batch_run import Outcome

EXIT_LINES_FAILED: Final = 4
"""Exit code of a job that has finished, and some of whose lines have failed."""

EXIT_SIGNAL: Final = 128
"""Exit code of a run that a signal stopped, less the number of the signal."""

_TASKS: Final = ("auto", "embed", "sparse", "score", "classify")
_OMITTED: Final = frozenset({"task", "max_requests", "max_items", "target_delay_s", "drain_timeout_s"})
"""Settings of an engine that no job needs, or that the command has itself."""


def _run_batch(**given: Any) -> None:
    with errors_in_flag_words():
        settings = given_settings(click.get_current_context())
        batch = Batch.of(given, settings.values.get("model"))
        if batch.existing == "resume" and _is_complete(batch):
            _check_unchanged(batch)
            click.echo(f"{batch.output} is complete: there is nothing to resume", err=True)
            return
        outcome = _run(batch, settings)
    if outcome.summary is not None:
        print_summary(outcome.summary, str(batch.output))
    if outcome.signal is not None and (outcome.summary is None or not outcome.summary.finished):
        click.echo(f"stopped by {outcome.signal.name}: run the same command with --resume to go on", err=True)
        raise click.exceptions.Exit(EXIT_SIGNAL + outcome.signal)
    if outcome.summary is not None and outcome.summary.failed:
        raise click.exceptions.Exit(EXIT_LINES_FAILED)


def _is_complete(batch: Batch) -> bool:
    from staged_pool.api.bulk.files import journal_of

    return batch.output.exists() and not journal_of(batch.output).exists()


def _check_unchanged(batch: Batch) -> None:
    """Check that the input of a complete output was not changed later.

    Raises:
        ConfigError: It was, by the times of the files.
    """
    if batch.source.exists() and batch.source.stat().st_mtime_ns > batch.output.stat().st_mtime_ns:
        raise ConfigError(
            f"{batch.source}: it was changed after {batch.output} was complete: there is nothing to resume; overwrite "
            "the output, or name another one"
        )


def _run(batch: Batch, settings: Given) -> Outcome:
    """Run the job in this process.

    Raises:
        StagedPoolError: It ended before its end; says how to go on.
    """
    process = settings.build(ProcessConfig)
    if batch.url is None:
        # Of the values of `--task`, one says what to do with texts and not what the model is.
        task = "auto" if batch.classifies else batch.task
        config = Given(values={**settings.values, "task": task}, sources=settings.sources).build(EngineConfig)
        server = settings.build(ServerConfig)
        from staged_pool.runtime.models.find import check_model

        check_model(config)
        prepare_environment(offline=config.offline)

    from staged_pool.api.commands import logs
    from staged_pool.api.commands.batch_run import Outcome, run_batch
    from staged_pool.api.commands.batch_sides import engine_side, server_side

    logs.configure(process.log_level, process.log_format)
    side = (
        engine_side(config, auto_truncate=server.auto_truncate) if batch.url is None else server_side(batch, batch.url)
    )
    outcome = Outcome()
    try:
        with showing_progress() as report:
            run(process.backend, partial(run_batch, batch, side, report, outcome))
    except ConfigError:
        raise
    except (InvalidInput, Unsupported) as error:  # a flag does not fit the model: a resumed job would end so, too
        raise ConfigError(str(error)) from error
    except (StagedPoolError, OSError) as error:
        raise StagedPoolError(f"{error}; run the same command with --resume to go on") from error
    return outcome


def _option(*names: str, help: str, **settings: Any) -> click.Option:
    return click.Option(names, help=help, **settings)


_FILE: Final[Mapping[str, Any]] = {"type": click.Path(path_type=Path, dir_okay=False), "metavar": "FILE"}
_POSITIVE: Final = click.IntRange(min=1)

_JOB_OPTIONS: Final = (
    _option(
        "--input", "-i", **_FILE, required=True,
        help="The lines: requests of OpenAI's batches (.jsonl), a column of Parquet (.parquet), or else texts.",
    ),
    _option(
        "--output", "-o", **_FILE, required=True,
        help="The answers: for texts .npy, .parquet or lines of JSON; for requests, lines of OpenAI's batches.",
    ),
    _option("--errors", **_FILE, help="File for lines that have failed. Without it, lines of JSON have them, too."),
    _option("--resume", is_flag=True, help="Go on with a job that was stopped or killed. If there is none, begin it."),
    _option("--overwrite", is_flag=True, help="Begin anew, in place of an output or a job that is there."),
    _option(
        "--task", type=click.Choice(_TASKS), default="auto", metavar="TASK", envvar=f"{ENV_PREFIX}TASK",
        help="classify: give each text the scores of labels, not a vector. The others are as for serve.",
    ),
    _option(
        "--dimensions", type=_POSITIVE, metavar="N",
        help="Keep the first N values of each text's vector. Only Matryoshka models lose little by it.",
    ),
    _option("--prompt-name", metavar="NAME", help="The model's prompt to put before each text, such as query."),
    _option(
        "--candidate-labels", metavar="LABELS",
        help="With --task classify: labels to choose among, with commas between them. For models of natural language "
        "inference, such as bart-large-mnli.",
    ),
    _option(
        "--hypothesis-template", metavar="TEXT", default=HYPOTHESIS,
        help="Statement that each candidate label completes; {} stands for the label.",
    ),
    _option(
        "--multi-label/--one-label", default=False,
        help="Score each candidate label by itself, or let the scores of a text add up to 1 (default).",
    ),
    _option("--truncate", is_flag=True, help="Cut texts that are longer than the model takes. Without it, they fail."),
    _option("--column", metavar="NAME", help="Column of Parquet that has the texts. Default: text, or the only one."),
    _option(
        "--input-format", type=click.Choice(("batch", "text", "parquet")), metavar="FORMAT",
        help="Format of the input where its name does not say: batch, text or parquet.",
    ),
    _option(
        "--format", type=click.Choice(("jsonl", "npy", "parquet")), metavar="FORMAT",
        help="Format of the output where its name does not say: jsonl, npy or parquet.",
    ),
    _option("--url", metavar="URL", help="Send the lines to the server at this address, and load no model here."),
    _option("--api-key", metavar="KEY", envvar=f"{ENV_PREFIX}API_KEY", help="API key of that server."),
    _option(
        "--concurrency", type=click.IntRange(1, 1024), default=32, metavar="N",
        help="Requests at once to that server. Default: 32.",
    ),
)  # fmt: skip

run_batch: Final = SettingsCommand(
    "run-batch",
    callback=_run_batch,
    params=[
        *_JOB_OPTIONS,
        *setting_options(
            EngineConfig,
            [row.name for row in settings_of(EngineConfig) if row.about.has_flag and row.name not in _OMITTED],
        ),
        *setting_options(ServerConfig, ("auto_truncate",)),
        *setting_options(ProcessConfig, ("backend", "log_level", "log_format"), log_level="warning"),
    ],
    help="""Answer a file of lines, and resume after any end of the process.

    A line of the input is a request of OpenAI's batches, or a text. Exit code: 0 if all lines are done, 4 if some have
    failed, 1 if the job could not go on, 2 if a flag or a file is wrong, 130 or 143 if a signal stopped it.
    """,
)
