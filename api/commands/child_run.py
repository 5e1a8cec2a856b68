"""Work of a child process: a front, or the engine process.

It gets its settings from its standard input, and open files by their numbers in them. It ends by itself when its
control line ends, so nothing of a server is left behind by a supervisor that is killed.
"""

from __future__ import annotations

import os
import pickle
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from staged_pool.api.commands.process import EXIT_FAILED, errors_in_flag_words, prepare_environment, run
from staged_pool.api.commands.process_config import ProcessConfig
from staged_pool.api.config import ServerConfig
from staged_pool.api.fleet.names import ENGINE
from staged_pool.api.fleet.processes import Files
from staged_pool.runtime.config import EngineConfig
from staged_pool.stages.log import get_logger

if TYPE_CHECKING:
    from staged_pool.runtime.pipelines.file import PipelineFile  # imported when there is one


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSettings:
    """All that a child must know. Nobody but the supervisor writes it, and nobody but its child reads it."""

    name: str
    """Such as `front-1`, or `engine`."""
    process: ProcessConfig
    server: ServerConfig
    models: Sequence[EngineConfig]
    pipelines: Sequence[PipelineFile]
    files: Files


def run_child() -> None:
    """Run one child until it is told to end. The handlers of its signals are set: see `child`."""
    settings: ChildSettings = pickle.load(sys.stdin.buffer)  # written by the parent of this process
    prepare_environment(offline=any(model.offline for model in settings.models))
    from staged_pool.api.commands import logs

    logs.configure(settings.process.log_level, settings.process.log_format, process=settings.name)
    try:
        with errors_in_flag_words():
            run(settings.process.backend, _program(settings))
    except click.exceptions.Exit as end:  # no command of Click's is around it
        sys.exit(end.exit_code)
    except BaseException:  # noqa: BLE001  # also what would end the process with status 0, as SystemExit does
        get_logger("staged_pool.fleet").exception("process.failed")
        logs.drain()
        sys.exit(EXIT_FAILED)


def _program(settings: ChildSettings) -> Callable[[], Awaitable[None]]:
    control, handover = (socket.socket(fileno=number) for number in (settings.files.control, settings.files.handover))
    if settings.name == ENGINE:
        os.close(settings.files.listener)  # an open one would keep the queue of connections alive
        from staged_pool.api.fleet.engine import run_engine_process

        return lambda: run_engine_process(settings.server, settings.models, control, handover)
    from staged_pool.api.fleet.front import run_front

    listener = socket.socket(fileno=settings.files.listener)
    listener.setblocking(False)
    return lambda: run_front(
        settings.server,
        settings.models,
        settings.pipelines,
        listener=listener,
        control=control,
        handover=handover,
    )
