"""What every command does around its work: settle the environment, run an event loop, end with a line and a code."""

from __future__ import annotations

import faulthandler
import importlib.util
import os
import re
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Final, NoReturn

import typer

from staged_pool.api.commands.flags import Backend
from staged_pool.api.process_memory import keep_freed_memory
from staged_pool.runtime.threads.openmp import spin_briefly
from staged_pool.stages.errors import ConfigError, StagedPoolError

EXIT_FAILED: Final = 1
EXIT_CONFIG: Final = 2

SWITCH_INTERVAL_S: Final = 0.0002
"""How long a thread may keep the interpreter's lock while another one wants it. A forward takes the lock some dozens of
times. While a client keeps the event loop busy it would wait for Python's 5 ms each time, and everybody for it."""

_STDERR: Final = 2
"""Its file descriptor."""

_RENAMED: Final = {"allow_media_domains": "allow_media_domain", "memory_limit_bytes": "memory_limit"}
"""Settings whose flags have another name."""


def prepare_environment(*, offline: bool) -> None:
    """Settle what libraries read from the environment when they are imported, and how memory is allocated. What the
    user has set stays."""
    tell_of_crashes()
    keep_freed_memory()
    spin_briefly()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # preprocess has its own threads
    for cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):  # of kernels, a few hundred KB each
        os.environ.setdefault(cache, "256")  # the sizes of packed batches fit; padded ones have no end of sizes
    # Pillow's images lie in one piece, not in pieces of 16 MB: what is larger than what the allocator keeps
    # (`memory.KEPT_BYTES`) then goes back to the system as soon as it is freed.
    os.environ.setdefault("PILLOW_BLOCK_SIZE", "1024m")
    if offline:
        os.environ["HF_HUB_OFFLINE"] = "1"


def tell_of_crashes() -> None:
    """Have a signal that ends the process, such as SIGSEGV or SIGBUS, write its name and all stacks to stderr.

    To the descriptor: a handler must not use Python's streams. Where it is on already, it stays as it is.
    """
    if not faulthandler.is_enabled():
        faulthandler.enable(_STDERR)


def run(backend: Backend, program: Callable[[], Awaitable[None]]) -> None:
    """Run an event loop, and have the threads of this process take turns more often than Python would."""
    import anyio

    sys.setswitchinterval(SWITCH_INTERVAL_S)

    uvloop = backend == "asyncio" and importlib.util.find_spec("uvloop") is not None
    anyio.run(program, backend=backend, backend_options={"use_uvloop": True} if uvloop else {})


@contextmanager
def errors_in_flag_words() -> Iterator[None]:
    """End the process with one line for an error that the user can do something about."""
    try:
        yield
    except ConfigError as error:
        _exit(in_flag_words(str(error)), EXIT_CONFIG)
    except StagedPoolError as error:
        _exit(str(error), EXIT_FAILED)


def _exit(message: str, code: int) -> NoReturn:
    from staged_pool.api.commands import logs

    logs.drain()
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(code)


def in_flag_words(message: str) -> str:
    """`preprocess_limit=0: must be ...` becomes `--preprocess-limit 0: must be ...`."""
    field = re.match(r"(\w+)=", message)
    if field is None:
        return message
    name = _RENAMED.get(field[1], field[1]).removesuffix("_s").replace("_", "-")
    return f"--{name} {message[field.end() :]}"
