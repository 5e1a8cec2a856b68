"""One run: a server of its own, schemathesis, and a look at the server afterwards."""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from tests.models.tiny import build

KINDS: Final[Mapping[str, str]] = {
    "vectors": "bert-mean",
    "scores": "ce-bert-1label",
    "labels": "seqcls-multiclass",
    "entities": "tokcls-ner",
    "sparse": "splade-bert",
    "tokens": "colbert-pylate",
}
"""Served models, so that every route exists: served name and kind of tiny model."""

KEY: Final = secrets.token_hex(16)
CONFIG: Final = Path(__file__).with_name("schemathesis.toml")

_SERVER: Final = "from staged_pool.api.commands.cli import main; main(prog_name='staged-pool')"
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
    with _server(folder) as url:
        command = [sys.executable, "-c", _FUZZER, "--config-file", str(CONFIG), "run", f"{url}/openapi.json"]
        command += ["-H", f"Authorization: Bearer {KEY}", "--phases", ",".join(phases), "-n", str(examples)]
        command += ["--seed", str(seed), "--continue-on-failure", "--no-color", "--suppress-health-check", "all"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Wrong(done.stdout + done.stderr)
        in_flight = _get(f"{url}/load")["server_load"]
        if in_flight or not _get(f"{url}/ready")["ready"]:
            raise Wrong(f"{in_flight} requests are left in flight")
    statuses = Counter(json.loads(line)["status"] for line in _log(folder) if '"request.finished"' in line)
    if statuses[504] > sum(statuses.values()) / 4:
        raise Wrong(f"too many of the requests had no time to be looked at: {dict(statuses)}")
    if crashes := [line for line in _log(folder) if '"request.crashed"' in line or '"connection.failed"' in line]:
        raise Wrong("\n".join(crashes[:10]))
    if KEY in "".join(_log(folder)):
        raise Wrong("the log has the key")
    found = _CASES.search(done.stdout)
    said = f"{done.stdout}\nanswers by status: {dict(sorted(statuses.items()))}"
    return int(found["cases"].replace(",", "")) if found else 0, said


@contextmanager
def _server(folder: Path) -> Iterator[str]:
    """A server process on a port of its own, which must end in order."""
    command = [sys.executable, "-c", _SERVER, "serve", "--port", "0", "--offline", "--log-format", "json"]
    command += ["--dtype", "float32", "--api-key-file", str(folder / "keys")]
    (folder / "keys").write_text(KEY)
    for name, kind in KINDS.items():
        command += ["--model", f"{name}={build(kind, folder / name)}"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stderr=log, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    try:
        yield _wait_until_ready(folder, process)
        process.terminate()
        if code := process.wait(timeout=60):
            raise Wrong(f"the server ended with {code}")
    finally:
        process.kill()
        process.wait()


def _wait_until_ready(folder: Path, process: subprocess.Popen[bytes]) -> str:
    until = time.monotonic() + 120
    while time.monotonic() < until and process.poll() is None:
        events = [json.loads(line) for line in _log(folder) if line.startswith("{") and line.endswith("}\n")]
        url = next((event["url"] for event in events if event["event"] == "server.listening"), None)
        if url is not None and _get(f"{url}/ready")["ready"]:
            return str(url)
        time.sleep(0.1)
    raise Wrong("the server does not start:\n" + "".join(_log(folder)[-5:]))


def _log(folder: Path) -> list[str]:
    return (folder / "log").read_text().splitlines(keepends=True)


def _get(url: str) -> Any:
    try:
        with urlopen(Request(url, headers={"authorization": f"Bearer {KEY}"}), timeout=30) as answer:
            return json.loads(answer.read())
    except HTTPError as error:
        with error:
            return json.loads(error.read())
