"""Process of a command: its environment, its event loop, its exit code and its error line."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Final, NoReturn

import click

from staged_pool.api.commands.process_config import Backend
from staged_pool.api.commands.table import setting_named
from staged_pool.api.process_memory import keep_freed_memory
from staged_pool.runtime.machine.signals import report_crashes, write_stacks_on_signals
from staged_pool.runtime.threads.openmp import spin_briefly
from staged_pool.stages.errors import ConfigError, StagedPoolError

EXIT_FAILED: Final = 1
EXIT_CONFIG: Final = 2

SWITCH_INTERVAL_S: Final = 0.0002
"""Seconds that a thread may hold the interpreter lock while another one waits for it.

A forward takes the lock some dozens of times. With Python's 5 ms, each time could wait that long for an event loop that
a client keeps busy, and all other requests would wait with it.
"""


def prepare_environment(*, offline: bool) -> None:
    """Set the environment that libraries read at import, and how memory is allocated.

    Variables that the user has set stay.

    Raises:
        ConfigError: There is no temporary folder, which torch needs for its import.
    """
    report_crashes()
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        raise ConfigError(
            "no folder for temporary files can be written to: name one in the variable TMPDIR, or make room in /tmp"
        ) from None
    keep_freed_memory()
    spin_briefly()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # preprocess has its own threads
    for cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):  # of kernels, a few hundred KB each
        os.environ.setdefault(cache, "256")  # the sizes of packed batches fit; padded ones have no end of sizes
    # Pillow allocates an image in one block, not in blocks of 16 MB. A block larger than the allocator keeps
    # (`process_memory.KEPT_BYTES`) then goes back to the system as soon as it is freed.
    os.environ.setdefault("PILLOW_BLOCK_SIZE", "1024m")
    if offline:
        os.environ["HF_HUB_OFFLINE"] = "1"


def run(backend: Backend, program: Callable[[], Awaitable[None]]) -> None:
    """Run a program on an event loop, with our handlers and a short switch interval."""
    import anyio

    write_stacks_on_signals()
    sys.setswitchinterval(SWITCH_INTERVAL_S)

    uvloop = backend == "asyncio" and importlib.util.find_spec("uvloop") is not None
    anyio.run(program, backend=backend, backend_options={"use_uvloop": True} if uvloop else {})


@contextmanager
def errors_in_flag_words() -> Iterator[None]:
    """End the process with one line of text for an error of the user."""
    try:
        yield
    except ConfigError as error:
        _exit(in_flag_words(str(error)), EXIT_CONFIG)
    except StagedPoolError as error:
        _exit(str(error), EXIT_FAILED)


def _exit(message: str, code: int) -> NoReturn:
    from staged_pool.api.commands import logs

    logs.drain()
    click.echo(f"error: {message}", err=True)
    raise click.exceptions.Exit(code)


def in_flag_words(message: str) -> str:
    """Replace a field at the start by its flag: `port=0: must be ...` becomes `--port 0: must be ...`."""
    if (field := re.match(r"(\w+)=", message)) is None:
        return message
    row = setting_named(field[1])
    flag = f"--{field[1].replace('_', '-')}" if row is None else row.flag
    return f"{flag} {message[field.end() :]}"
