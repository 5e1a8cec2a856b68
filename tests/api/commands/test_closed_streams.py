"""A process manager may start the command without standard streams: no connection gets their place."""

from __future__ import annotations

import shlex
import signal
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.servers.preloaded import ROOT
from tests.servers.process import START_S, serve_command, wait_until


@pytest.fixture(autouse=True)
def nothing_blocks_the_event_loop() -> None:
    """These tests have no event loop, and wait for processes."""


@pytest.mark.parametrize("closed", ["2>&-", "0<&- 1>&-", "0<&- 1>&- 2>&-"])
def test_a_server_without_standard_streams_serves_and_ends_in_order(
    closed: str, tiny_folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "socket"
    command = serve_command("--model", str(tiny_folder), "--unix-socket", str(path))
    process = subprocess.Popen(["/bin/sh", "-c", f"exec {shlex.join(command)} {closed}"], cwd=ROOT)
    try:
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://server") as client:

            def is_ready() -> bool:
                assert process.poll() is None, "it has ended"
                return path.is_socket() and client.get("/ready").status_code == 200

            wait_until(is_ready, START_S)
            answer = client.post("/v1/embeddings", json={"input": "a"})
        process.send_signal(signal.SIGTERM)
        assert (answer.status_code, process.wait(60)) == (200, 0)
    finally:
        process.kill()
        process.wait()
