"""The threads that share a forward: how long they spin between its parts before they sleep, and when they end.

On the CPU, torch shares a forward between threads of OpenMP, part by part. Those of a short text take tens of
microseconds each, those of an image hundreds, and none of them ends everywhere at the same time. A thread that sleeps
between them has to be woken for every one, which costs more than its help brings; one that spins for milliseconds, as
it does by itself, takes a core from tokenizing and from the event loop. So they spin for a tenth of a millisecond.
perf/NOTES.md has what less and more would give ("How long they spin").

libgomp lets none of them spin for more than an eighth of that while a process has more of them than cores. A thread
that shares its forwards keeps its helpers for the next one. So where two threads take turns, one with forwards of texts
and one with those of images, the helpers of one must end for those of the other to spin.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import suppress
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Final

_SPIN_BRIEFLY: Final[Mapping[str, str]] = {"OMP_WAIT_POLICY": "ACTIVE", "GOMP_SPINCOUNT": "8000"}
"""For libgomp. 8,000 turns take 0.1 to 0.4 ms. With `ACTIVE` alone its threads would spin
for minutes. Without it they would hardly spin (100 turns, and not 1,000) where a process has more of them than cores:
here, each thread that runs forwards has its own."""

VARIABLES: Final = tuple(_SPIN_BRIEFLY)
"""Those of the environment that say how long."""

_SLEEP: Final[Mapping[str, str]] = {"OMP_WAIT_POLICY": "PASSIVE"}


def spin_briefly(environment: MutableMapping[str, str] = os.environ) -> None:
    """Have torch's threads wait for each other for a moment, and then sleep. Call it before torch is first imported.

    Where torch does not bring libgomp, which can be told for how long, they sleep at once. What the user has set stays.
    """
    if not environment.keys() & set(VARIABLES):
        environment.update(_SPIN_BRIEFLY if _brings_libgomp() else _SLEEP)


_PAUSE_HARD: Final = 2
"""`omp_pause_hard`, of OpenMP 5.0, section 3.2.44: what is not needed to go on is given up."""


def release_omp_team() -> None:
    """End the threads that wait to share the next forward of the calling one, which has new ones started for that.

    This takes some 0.1 ms, and their start 0.1 to 0.5. Does nothing where torch has not been imported, or brings no
    libgomp. It is never an error: a process that may open no more files cannot look for the library, and goes on.
    """
    with suppress(OSError, MemoryError):
        if (pause := _pause()) is not None:
            pause(_PAUSE_HARD)


def _pause() -> Callable[[int], int] | None:
    """`omp_pause_resource_all` of the libgomp that torch has loaded."""
    for path in _libgomps():
        with suppress(OSError, AttributeError):  # it is not loaded yet, or is older than OpenMP 5.0
            pause: Callable[[int], int] = ctypes.CDLL(str(path), os.RTLD_NOW | os.RTLD_NOLOAD).omp_pause_resource_all
            return pause
    return None


def _brings_libgomp() -> bool:
    return bool(_libgomps())


@lru_cache(1)
def _libgomps() -> tuple[Path, ...]:
    torch = find_spec("torch")  # does not import it
    folders = (torch and torch.submodule_search_locations) or ()
    return tuple(path for folder in folders for path in (Path(folder) / "lib").glob("libgomp*"))
