"""Server as the image and the chart run it: process 1, user 10001, no rights, and a root that is read-only."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.models.tiny import build
from tests.packaging.floors import ROOT
from tests.servers.process import ServerProcess, serve_command

SCRIPT: Final = Path(__file__).with_name("confined.sh")
NAMESPACES: Final = (
    "unshare",
    "--mount",
    "--pid",
    "--fork",
    "--kill-child",
    "--mount-proc",
    "--propagation",
    "private",
)
NEEDED: Final = ("unshare", "setpriv", "findmnt")


def _lacks() -> str:
    """Return the reason why this machine cannot confine a process; empty if it can."""
    if sys.platform != "linux":
        return "only Linux has namespaces"
    if missing := [program for program in NEEDED if shutil.which(program) is None]:
        return f"{', '.join(missing)} of util-linux is not installed"
    if os.geteuid() != 0:
        return "only root makes namespaces"
    tried = subprocess.run([*NAMESPACES, "true"], capture_output=True, text=True, check=False)
    return f"namespaces are not allowed: {tried.stderr.strip()}" if tried.returncode else ""


LACKS: Final = _lacks()
pytestmark = pytest.mark.skipif(bool(LACKS), reason=LACKS)


def confined(folder: Path, *command: str) -> list[str]:
    """Return the command that runs another one confined, with only `folder` to write into."""
    read = ":".join({sys.base_prefix, sys.prefix, str(ROOT)})
    return [*NAMESPACES, "bash", str(SCRIPT), str(folder), read, *command]


def inner(server: ServerProcess) -> int:
    """Return the number of the server by our count; by its own it is process 1."""
    outer = server.process.pid
    (child,) = Path(f"/proc/{outer}/task/{outer}/children").read_text().split()
    return int(child)


@pytest.fixture
def writable() -> Iterator[Path]:
    """A folder for the cache of the server, and one for other files. Pytest's own folders are closed to other users."""
    with tempfile.TemporaryDirectory(prefix="staged-pool-confined-") as made:
        folder = Path(made)
        folder.chmod(0o755)
        for name in ("cache", "tmp"):
            (folder / name).mkdir()
            os.chown(folder / name, 10001, 10001)
        yield folder


@pytest.mark.parametrize("fronts", [0, 1])
def test_it_serves_and_drains(fronts: int, writable: Path, tmp_path: Path) -> None:
    model = build("bge-m3", writable / "model")
    for path in (model, *model.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    variables = {
        "HF_HOME": str(writable / "cache/huggingface"),
        "XDG_CACHE_HOME": str(writable / "cache"),
        "TMPDIR": str(writable / "tmp"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    serve = serve_command("--model", str(model), "--torch-threads", "1", "--api-servers", str(fronts))
    with ServerProcess(confined(writable, *serve), tmp_path / "log", environment=variables) as server:
        server.wait_ready()
        status, answer = server.ask("/v1/embeddings", {"input": "a text"})
        assert status == 200, answer
        found = dict(
            line.split(":\t", 1)
            for line in Path(f"/proc/{inner(server)}/status").read_text().splitlines()
            if ":\t" in line
        )
        assert found["Uid"].split() == ["10001"] * 4
        assert found["NSpid"].split()[-1] == "1"
        assert (found["CapEff"], found["CapBnd"], found["NoNewPrivs"]) == ("0" * 16, "0" * 16, "1")
        os.kill(inner(server), signal.SIGTERM)
        assert server.exit_code() == 0
        assert [event["event"] for event in server.events][-1] == "server.stopped"
    written = {path.parts[len(writable.parts)] for path in writable.rglob("*") if path.stat().st_uid == 10001}
    assert written <= {"cache", "tmp"}


def test_the_script_does_nothing_outside_a_namespace(writable: Path) -> None:
    done = subprocess.run(["bash", SCRIPT, writable, sys.prefix, "true"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "read-only" in done.stderr


def test_the_root_is_read_only(writable: Path) -> None:
    tries = (
        f"for f in / /tmp /var/tmp {ROOT} {sys.prefix}; do touch $f/written && echo $f; done 2>/dev/null; touch cache/a"
    )
    done = subprocess.run(confined(writable, "sh", "-c", tries), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
    assert (writable / "cache/a").exists()
