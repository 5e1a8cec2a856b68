"""Server process for the chaos tests: `python -m tests.chaos.program <scenario> <backend> <listening socket> <gate>`.

It is the real server, with its signal handlers and its exit, on a model of letters. Some texts cause a fault, see
`Deeds`; the scenario sets the rest.
"""

from __future__ import annotations

import resource
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final, Literal, TypeAlias, cast
from unittest import mock

import anyio

from staged_pool.api.commands import logs
from staged_pool.api.config import ServerConfig
from staged_pool.api.http import server
from staged_pool.api.limits import server_state
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.memory.governor import MemoryGovernor
from staged_pool.stages.channel import Channel
from staged_pool.stages.errors import DeviceLost, StagedPoolError
from staged_pool.stages.stage import StageOptions
from staged_pool.stages.supervise import RestartPolicy
from tests.servers.engines import engines_on
from tests.support.cards import CARD
from tests.support.channels import acting_channels
from tests.support.model import LetterModel

Scenario: TypeAlias = Literal["plain", "crash", "hang", "loading", "few files", "wide"]

EXIT_FAILED: Final = 1
GRACE_S: Final = 0.4
"""Short grace period, in seconds, for tests that wait until it is over."""
PATIENT: Final = ("plain", "crash", "few files")
WATCHDOG_S: Final = 0.3
FILES: Final = 48
ALLOCATED_BYTES: Final = 2**28
WIDE: Final = 1_000_000
"""Numbers of a vector whose answer is larger than any socket buffer."""


class Deeds:
    """Faults that certain texts cause: `hold`, `allocate`, `lose` and `hang`.

    Args:
        gate: `hold` waits in preprocess until this file exists.
    """

    def __init__(self, gate: Path) -> None:
        self._gate = gate

    def preprocess(self, texts: Sequence[str]) -> None:
        if "hold" in texts:
            while not self._gate.exists():
                time.sleep(0.005)
        if "allocate" in texts:
            bytearray(ALLOCATED_BYTES)

    def forward(self, texts: Sequence[str]) -> None:
        if "lose" in texts:
            raise DeviceLost("the device is lost")
        if "hang" in texts:
            threading.Event().wait()


async def crash(point: str) -> None:
    if point == "send postprocess":  # by the batch stage
        raise RuntimeError("a bug")


def engines_of(scenario: Scenario, gate: Path) -> server.OpenEngines:
    if scenario == "loading":
        return never
    deeds = Deeds(gate)
    options = StageOptions(
        restarts=RestartPolicy(first_delay_s=0.001, max_delay_s=0.01),
        channel=acting_channels(crash) if scenario == "crash" else Channel,
    )
    card = replace(CARD, width=WIDE) if scenario == "wide" else CARD
    model = LetterModel(card, on_preprocess=deeds.preprocess, on_forward=deeds.forward)

    return engines_on(model, options=options)


@asynccontextmanager
async def never(configs: Sequence[EngineConfig], memory: MemoryGovernor) -> AsyncIterator[Mapping[str, Engine]]:
    """Load for ever: a load cannot be interrupted."""
    with anyio.CancelScope(shield=True):
        await anyio.to_thread.run_sync(threading.Event().wait)
    yield {}


async def main(scenario: Scenario, listener: socket.socket, gate: Path) -> None:
    if scenario == "few files":
        resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES))
    serving = server.Server(
        ServerConfig(),
        [EngineConfig(watchdog_s=WATCHDOG_S if scenario == "hang" else 120, drain_timeout_s=10)],
        owns_process=True,
        open_engines=engines_of(scenario, gate),
    )
    await serving.run(listener)


if __name__ == "__main__":
    scenario: Scenario = cast(Scenario, sys.argv[1])
    backend, descriptor, gate = sys.argv[2:]
    logs.configure("info", "json")
    listener = socket.socket(fileno=int(descriptor))
    listener.setblocking(False)
    uvloop = {"use_uvloop": True} if backend == "uvloop" else {}
    with ExitStack() as patches:
        if scenario not in PATIENT:
            for module, name in ((server, "GRACE_S"), (server_state, "GRACE_S"), (server, "OVERDUE_S")):
                patches.enter_context(mock.patch.object(module, name, GRACE_S))
        try:
            anyio.run(
                main,
                scenario,
                listener,
                Path(gate),
                backend="trio" if backend == "trio" else "asyncio",
                backend_options=uvloop,
            )
        except StagedPoolError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(EXIT_FAILED)
