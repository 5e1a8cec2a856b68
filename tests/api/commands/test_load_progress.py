"""Progress of a load: on `/ready`, as log events, and as a line on a terminal. The hub is on this machine."""

from __future__ import annotations

import os
import re
import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from staged_pool.api.commands.load_line import LoadLine, size
from staged_pool.runtime.load_progress import LoadPhase, LoadStatus
from tests.servers.hub import hub_with
from tests.servers.process import COMMAND, ServerProcess
from tests.support.gates import Gate

NAME = "org/tiny"
HELD = "notes.txt"
"""A file of the model that no part of it reads. It is large, because the client counts in steps of 10 MB."""
HELD_BYTES = 30_000_000


@pytest.fixture(autouse=True)
def nothing_blocks_the_event_loop() -> None:
    """These tests have no event loop, and wait for processes."""


@pytest.fixture
def model(tiny_folder: Path, tmp_path: Path) -> Path:
    """A model on the hub."""
    folder = tmp_path / "on the hub"
    shutil.copytree(tiny_folder, folder)
    (folder / HELD).write_bytes(bytes(HELD_BYTES))
    return folder


@contextmanager
def downloading(model: Path, cache: Path, log: Any, *flags: str, port: int | None = None) -> Iterator[Any]:
    """Run a server that has downloaded one third; the block gets it, and a function that lets it go on."""
    held = Gate()
    with hub_with(NAME, model, lambda path: held() if path == HELD else None) as hub:
        command = [*COMMAND, "serve", "--port", str(port or 0), "--model", NAME, "--dtype", "float32", *flags]
        environment = {
            "HF_ENDPOINT": hub,
            "HF_HOME": str(cache),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "NO_PROXY": "127.0.0.1",
            "COLUMNS": "120",
        }
        with ServerProcess(command, log, port=port, environment=environment) as server:
            try:
                if port is None:
                    server.wait_listening()
                server.wait_until(lambda: 20 < percent(server) < 50, within_s=60)
                yield server, held.open
            finally:
                held.open()


def percent(server: ServerProcess) -> int:
    """Return the percentage in `/ready`, which is that of the files that have begun; 0 before."""
    try:
        found: int = server.ask("/ready")[1]["loading"]["percent"]
    except (OSError, KeyError):  # it does not listen yet, or has not asked the hub yet
        return 0
    return found


@pytest.mark.parametrize("fronts", [0, 1])
def test_a_download_is_told_by_ready_and_by_the_log(fronts: int, model: Path, tmp_path: Path) -> None:
    flags = ("--log-format", "json", "--api-servers", str(fronts))
    with downloading(model, tmp_path / "cache", tmp_path / "log", *flags) as (server, go_on):
        status, answer = server.ask("/ready")
        assert status == 503
        assert answer["loading"] == {"model": NAME, "phase": "download", "percent": answer["loading"]["percent"]}
        assert answer["reason"] == f"loading the model: downloading {NAME}, {answer['loading']['percent']} %"
        assert server.ask("/health")[0] == 200
        refused = server.ask("/v1/embeddings", {"input": "a"})
        assert (refused[0], "downloading" in str(refused[1])) == (503, True)
        go_on()
        server.wait_ready()
        assert "loading" not in server.ask("/ready")[1]
        phases = [
            (event["event"], event["phase"]) for event in server.events if event["event"].startswith("model.phase")
        ]
        assert phases == [
            (event, phase)
            for phase in ("download", "weights", "warm-up")
            for event in ("model.phase_began", "model.phase_ended")
        ]
        (end,) = [event for event in server.events if event["event"] == "model.phase_ended" and "bytes" in event]
        assert end["bytes"] > HELD_BYTES
        assert end["seconds"] > 0
        assert "%|" not in server.log, "the bars of the hub's client are not for logs"


def test_a_download_is_a_line_on_a_terminal(model: Path, tmp_path: Path) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    terminal, its_end = os.openpty()
    shown = bytearray()

    def watch() -> None:
        while True:
            try:
                shown.extend(os.read(terminal, 65536))
            except OSError:  # all other ends are closed
                return

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    with downloading(model, tmp_path / "cache", its_end, port=port) as (server, go_on):
        os.close(its_end)
        server.wait_until(lambda: re.search(rb"downloading org/tiny  .*  \d+ %  10\.\d MB of 3", shown) is not None)
        go_on()
        server.wait_ready()
        server.wait_until(lambda: b"  ready   " in re.sub(rb"\x1b\[[0-9;]*m", b"", shown))
    watching.join(20)
    os.close(terminal)
    text = re.sub(r"\x1b\[[0-9;]*m", "", shown.decode())
    assert re.search(r"downloaded org/tiny, 3\d\.\d MB, in \d+\.\d s\r\n", text)
    assert re.search(r"read the weights of org/tiny in \d+\.\d s\r\n", text)
    assert re.search(r"warmed org/tiny up in \d+\.\d s\r\n", text)
    assert text.rindex("\r\x1b[2K") > text.rindex(" MB of 3"), "the line is removed"


def test_the_line_has_the_part_the_rate_and_the_rest() -> None:
    now, lines = 100.0, list[str]()
    line = LoadLine(lines.append, clock=lambda: now, colours=False)
    line(LoadStatus("m", LoadPhase.DOWNLOAD, 20_000_000, 100_000_000))
    now += 2.0
    line(LoadStatus("m", LoadPhase.DOWNLOAD, 60_000_000, 100_000_000))
    assert lines[0].startswith("downloading m  ")
    assert lines[0].endswith("   20 %  20.0 MB of 100.0 MB")
    assert lines[1].endswith("   60 %  60.0 MB of 100.0 MB  20.0 MB/s  2 s left")
    line(LoadStatus("m", LoadPhase.DOWNLOAD, 60_000_001, 100_000_000))
    assert len(lines) == 2, "not more often than an eye can follow"
    line(LoadStatus("m", LoadPhase.WEIGHTS))
    line(None)
    assert lines[2:] == ["reading the weights of m ...", ""]


def test_a_narrow_terminal_has_a_short_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    lines: list[str] = []
    LoadLine(lines.append)(LoadStatus("m", LoadPhase.DOWNLOAD, 1, 2))
    assert lines == ["downloading m   50 %  1 B of "]


@pytest.mark.parametrize(("bytes_", "text"), [(0, "0 B"), (999, "999 B"), (1e3, "1.0 kB"), (2.5e9, "2.5 GB")])
def test_sizes_have_the_unit_that_fits(bytes_: float, text: str) -> None:
    assert size(bytes_) == text
