"""OpenMP threads, which share a forward on the CPU: their spin time and their end.

On the CPU, torch shares a forward between OpenMP threads, one parallel region after the other. A region takes tens of
microseconds for a short text, and hundreds for an image. A thread that sleeps between regions must be woken for each,
which costs more than its help saves. A thread that spins for milliseconds, the default, takes a core from tokenizing
and from the event loop. So these threads spin for a tenth of a millisecond, and then sleep. perf/NOTES.md has the
measurements ("How long they spin").

libgomp cuts the spin time to an eighth while a process has more of these threads than cores. A thread keeps its OpenMP
team for its next forward. So where a thread with forwards of texts and one with forwards of images take turns, the team
of one must be released for the other to spin.
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
"""Settings for libgomp: 8,000 iterations of spinning, which take 0.1 to 0.4 ms.

With `ACTIVE` alone, threads would spin for minutes. Without it, they would spin for 100 iterations only where a process
has more OpenMP threads than cores.
"""

VARIABLES: Final = tuple(_SPIN_BRIEFLY)
"""Environment variables that set the spin time."""

_SLEEP: Final[Mapping[str, str]] = {"OMP_WAIT_POLICY": "PASSIVE"}


def spin_briefly(environment: MutableMapping[str, str] = os.environ) -> None:
    """Make torch's threads spin briefly, and then sleep. Call it before torch is first imported.

    If torch does not bring libgomp, whose spin time can be set, they sleep at once. Settings of the user stay.
    """
    if not environment.keys() & set(VARIABLES):
        environment.update(_SPIN_BRIEFLY if _brings_libgomp() else _SLEEP)


_PAUSE_HARD: Final = 2
"""`omp_pause_hard` of OpenMP 5.0, section 3.2.44: release all resources that can be made again."""


def release_omp_team() -> None:
    """End the OpenMP threads of the calling thread. Its next forward starts new ones.

    Ending them takes some 0.1 ms, and starting them 0.1 to 0.5 ms. Does nothing if torch is not imported, or brings no
    libgomp. Never raises: if no more files can be opened to find the library, the threads stay.
    """
    with suppress(OSError, MemoryError):
        if (pause := _pause()) is not None:
            pause(_PAUSE_HARD)


def _pause() -> Callable[[int], int] | None:
    """Return `omp_pause_resource_all` of the libgomp that torch has loaded."""
    for path in _libgomps():
        with suppress(OSError, AttributeError):  # not loaded yet, or older than OpenMP 5.0
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
