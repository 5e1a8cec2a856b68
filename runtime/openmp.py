"""How long the threads that share a forward spin between its parts, before they sleep.

On the CPU, torch shares a forward between threads of OpenMP, part by part. Those of a short text take tens of
microseconds each. A thread that sleeps between them has to be woken for every one, which costs more than its help
brings; one that spins for milliseconds, as it does by itself, takes a core from tokenizing and from the event loop.
12 tokens of MiniLM in float32, two cores of a Zen 3: 6.5 ms on one thread; on two 9.5 ms if they sleep at once, 4.5 ms
if they spin for some 50 microseconds before that.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from importlib.util import find_spec
from pathlib import Path
from typing import Final

_SPIN_BRIEFLY: Final[Mapping[str, str]] = {"OMP_WAIT_POLICY": "ACTIVE", "GOMP_SPINCOUNT": "2000"}
"""For libgomp. With `ACTIVE` alone its threads would spin for minutes. Without it they would hardly spin (100 turns)
where a process has more of them than cores: here, each thread that runs forwards has its own."""

VARIABLES: Final = tuple(_SPIN_BRIEFLY)
"""Those of the environment that say how long."""

_SLEEP: Final[Mapping[str, str]] = {"OMP_WAIT_POLICY": "PASSIVE"}


def spin_briefly(environment: MutableMapping[str, str] = os.environ) -> None:
    """Have torch's threads wait for each other for a moment, and then sleep. Call it before torch is first imported.

    Where torch does not bring libgomp, which can be told for how long, they sleep at once. What the user has set stays.
    """
    if not environment.keys() & set(VARIABLES):
        environment.update(_SPIN_BRIEFLY if _brings_libgomp() else _SLEEP)


def _brings_libgomp() -> bool:
    torch = find_spec("torch")  # does not import it
    return torch is not None and any(
        any((Path(folder) / "lib").glob("libgomp*")) for folder in torch.submodule_search_locations or ()
    )
