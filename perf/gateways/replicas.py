"""Replicas: three processes of `staged-pool serve` on fixed ports, which can be killed, drained and restarted."""

from __future__ import annotations

import random
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from perf.tools.client import Connection, get
from perf.tools.servers import ROOT, program

COUNT: Final = 3
PORTS: Final = range(20_000, 30_000)
"""Ports to choose from. The system gives none of them to a client.

So a restarted replica finds its port free, and a check of a dead one never connects to itself.
"""
START_S: Final = 600.0
END_S: Final = 300.0
POLL_S: Final = 0.05

FLAGS: Final = (
    *("--offline", "--dtype", "float32", "--torch-threads", "1", "--no-access-log"),
    *("--drain-lead", "2", "--max-connections", "2000", "--max-requests", "256"),
)
"""Flags of each replica; deploy/README.md has those that matter for gateways.

With few requests in flight, overload is rejected on any machine, however fast it is.
"""


class Replica:
    """One replica, which keeps its port over restarts.

    Args:
        model: Folder of its model.
        log: File that takes its output.
        port: Its port.
    """

    def __init__(self, model: Path, log: Path, port: int) -> None:
        self.port = port
        self._log = log
        self._command = [*program(), "serve", "--model", str(model), "--port", str(self.port), *FLAGS]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process, and do not wait for it."""
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                self._command,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # so that Ctrl-C reaches this process only, which stops the replicas
            )

    def wait_ready(self) -> None:
        """Wait until `/ready` is 200.

        Raises:
            RuntimeError: The process has ended, or takes too long.
        """
        latest = time.monotonic() + START_S
        while self._status("/ready") != 200:
            if self.process.poll() is not None or time.monotonic() > latest:
                raise RuntimeError(f"a replica is not ready:\n{self._log.read_text(errors='replace')[-2000:]}")
            time.sleep(POLL_S)

    def kill(self) -> None:
        """End the process at once, with SIGKILL."""
        self.process.kill()
        self.process.wait()

    def drain(self) -> None:
        """Send SIGTERM, and wait for the end.

        Raises:
            RuntimeError: It ended with another status than 0.
        """
        self.process.send_signal(signal.SIGTERM)
        if (code := self.process.wait(END_S)) != 0:
            raise RuntimeError(f"a replica ended with {code}:\n{self._log.read_text(errors='replace')[-2000:]}")

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The process of the last start."""
        if self._process is None:
            raise RuntimeError("the replica was never started")
        return self._process

    def _status(self, path: str) -> int | None:
        with suppress(OSError):
            connection = Connection(self.port, timeout_s=START_S)
            try:
                return connection.exchange(get(path)).status
            finally:
                connection.close()
        return None


def lasting_ports(count: int) -> list[int]:
    """Return ports that are free, and that no client gets later."""
    found: list[int] = []
    while len(found) < count:
        port = random.choice(PORTS)  # several measurements may run at once
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found += [port] if port not in found else []
    return found


@contextmanager
def replicas(model: Path, folder: Path) -> Iterator[Sequence[Replica]]:
    """Run replicas of a model for a block; it begins when all are ready."""
    folder.mkdir(parents=True)
    ports = lasting_ports(COUNT)
    running = [Replica(model, folder / f"replica-{number}.log", port) for number, port in enumerate(ports)]
    try:
        for replica in running:
            replica.start()
        for replica in running:
            replica.wait_ready()
        yield running
    finally:
        for replica in running:
            with suppress(RuntimeError):
                replica.kill()
