"""One run: a server of its own, schemathesis, and a look at the server afterwards."""

from __future__ import annotations

import re
import secrets
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from tests.models.tiny import build
from tests.servers.process import ServerProcess, serve_command

KINDS: Final[Mapping[str, str]] = {
    "vectors": "bert-mean",
    "scores": "ce-bert-1label",
    "labels": "ce-nli-3label",
    "entities": "tokcls-ner",
    "sparse": "splade-bert",
    "tokens": "colbert-pylate",
}
"""Served models, so that every route exists: served name and kind of tiny model."""

KEY: Final = secrets.token_hex(16)
CONFIG: Final = Path(__file__).with_name("schemathesis.toml")

_FUZZER: Final = "from schemathesis.cli import schemathesis; schemathesis()"
_CASES: Final = re.compile(r"(?P<cases>[\d,]+) generated")


class Wrong(Exception):
    """A finding. Its text says how to repeat it."""


def fuzz(
    folder: Path, *, examples: int, seed: int, phases: Sequence[str] = ("examples", "coverage", "fuzzing")
) -> tuple[int, str]:
    """Run schemathesis against a server, and check the answers and the server.

    Args:
        folder: Takes models and logs; nothing else may be in it.
        examples: Maximum for each route, in the phase of fuzzing.
        seed: Equal seeds send equal requests.
        phases: Phases of schemathesis.

    Returns:
        The number of generated requests, and the output of schemathesis.

    Raises:
        Wrong: An answer is not as described, or the server has leftovers.
    """
    with _server(folder) as server:
        server.wait_ready()
        description = f"http://127.0.0.1:{server.port}/openapi.json"
        command = [sys.executable, "-c", _FUZZER, "--config-file", str(CONFIG), "run", description]
        command += ["-H", f"Authorization: Bearer {KEY}", "--phases", ",".join(phases), "-n", str(examples)]
        command += ["--exclude-path", "/stages/live"]  # its answer never ends
        command += ["--seed", str(seed), "--continue-on-failure", "--no-color", "--suppress-health-check", "all"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Wrong(done.stdout + done.stderr)
        in_flight = server.ask("/load")[1]["server_load"]
        if in_flight or server.ask("/ready")[0] != 200:
            raise Wrong(f"{in_flight} requests are left in flight")
        if code := server.end():
            raise Wrong(f"the server ended with {code}")
    statuses = Counter(event["status"] for event in server.events if event["event"] == "request.finished")
    if statuses[504] > sum(statuses.values()) / 4:
        raise Wrong(f"too many of the requests had no time to be looked at: {dict(statuses)}")
    if crashes := [event for event in server.events if event["event"] in ("request.crashed", "connection.failed")]:
        raise Wrong("\n".join(map(str, crashes[:10])))
    if KEY in server.log:
        raise Wrong("the log has the key")
    found = _CASES.search(done.stdout)
    said = f"{done.stdout}\nanswers by status: {dict(sorted(statuses.items()))}"
    return int(found["cases"].replace(",", "")) if found else 0, said


def _server(folder: Path) -> ServerProcess:
    """Start a server of all kinds."""
    (folder / "keys").write_text(KEY)
    models = [f"--model={name}={build(kind, folder / name)}" for name, kind in KINDS.items()]
    flags = ("--dtype", "float32", "--api-key-file", str(folder / "keys"), *models)
    return ServerProcess(serve_command(*flags), folder / "log", key=KEY)
