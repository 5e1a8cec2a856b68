"""The command `check`: read, load and run a model without serving it."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Any, Final

import click

from staged_pool.api.commands.given import given_settings
from staged_pool.api.commands.options import SettingsCommand, setting_options
from staged_pool.api.commands.process import errors_in_flag_words, prepare_environment
from staged_pool.api.commands.process_config import ProcessConfig
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.machine.memory import Machine

if TYPE_CHECKING:
    from staged_pool.runtime.card import ModelCard

_SETTINGS: Final = (
    "revision", "offline", "task", "score_template", "score_tokens", "allow_pickle", "trust_remote_code",
    "device", "dtype", "attention",
)  # fmt: skip


def _check(*, folder: str, **_: Any) -> None:
    from staged_pool.runtime.models.find import check_model, find_model
    from staged_pool.runtime.models.images.torchvision import leave_out_broken_torchvision

    with errors_in_flag_words():
        given = given_settings(click.get_current_context())
        process = given.build(ProcessConfig)
        config = dataclasses.replace(given.build(EngineConfig), model=folder)
        check_model(config)
        prepare_environment(offline=config.offline)

        from staged_pool.api.commands import logs

        logs.configure(process.log_level, process.log_format)
        found = find_model(config)

        leave_out_broken_torchvision()
        from staged_pool.runtime.models.load import load_model

        _show(load_model(config, found).card)


def _show(card: ModelCard) -> None:
    """Print a card: a report on a terminal, JSON elsewhere."""
    if not sys.stdout.isatty():
        click.echo(json.dumps(dataclasses.asdict(card)))
        return
    from rich.console import Console

    from staged_pool.api.commands.check_view import render_card

    machine = Machine()
    used = machine.resident_bytes()
    Console(highlight=False).print(render_card(card, used, machine.limit_bytes() - used))


check: Final = SettingsCommand(
    "check",
    callback=_check,
    params=[
        click.Argument(["folder"]),
        *setting_options(EngineConfig, _SETTINGS),
        *setting_options(ProcessConfig, ("log_level", "log_format"), log_level="warning"),
    ],
    help="""Read, load and run a model without serving it.

    FOLDER: the model, a folder or a hub id. Prints a report on a terminal, and one JSON object into a file or a pipe.
    If the model cannot be served, prints the reason in one line, with exit code 2.
    """,
)
