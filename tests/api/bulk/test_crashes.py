"""After SIGKILL at any moment, the next run answers each line that is left, once."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from staged_pool.api.bulk.files import part_of
from staged_pool.api.commands.run_batch import EXIT_LINES_FAILED
from tests.api.bulk.jobs import line_of, read_now, request

ROOT = Path(__file__).parents[3]
LONGEST_S = 300.0
"""Seconds after which a process hangs."""


def killed_at(command: Sequence[object], output: Path, part_bytes: float) -> bool:
    """Run a command, and kill it once the output has this many bytes. Returns False if it ended before."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [str(word) for word in command], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
    ) as process:
        until = time.monotonic() + LONGEST_S
        while process.poll() is None:
            if _size(part_of(output)) >= part_bytes:
                process.kill()
            assert time.monotonic() < until, "the job hangs"
            time.sleep(0.002)
        _, errors = process.communicate()
    assert process.returncode in (0, EXIT_LINES_FAILED, -signal.SIGKILL), errors
    return process.returncode == -signal.SIGKILL


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def answers(path: Path) -> Counter[str]:
    """Return the lines of an output, without ids and times."""
    return Counter(json.dumps(_plain(line), sort_keys=True) for line in read_now(path))


def _plain(line: dict[str, Any]) -> dict[str, Any]:
    response = dict(line["response"] or {}, request_id=None)
    if isinstance(response.get("body"), dict):
        response["body"] = {name: value for name, value in response["body"].items() if name not in ("id", "created")}
    error = dict(line["error"] or {})
    return {"custom_id": line["custom_id"], "response": response, "error": error}


def write_requests(path: Path, count: int) -> None:
    """Write requests of embeddings; some lines are wrong, and some names are there twice."""
    lines = [request(str(number // 2), f"text {number}") for number in range(count)]
    lines[count // 2] = {"custom_id": "no body"}
    lines[count // 3] = request("wrong model", model="none")
    path.write_bytes(b"".join(line_of(line) + b"\n" for line in lines))


def test_each_line_is_answered_once_whatever_kills_there_were(tmp_path: Path) -> None:
    source, undisturbed, output = tmp_path / "in.jsonl", tmp_path / "undisturbed.jsonl", tmp_path / "out.jsonl"
    write_requests(source, 2000)
    program = [sys.executable, "-m", "tests.api.bulk.killed_job", source]
    assert not killed_at([*program, undisturbed], undisturbed, math.inf)
    total = undisturbed.stat().st_size
    kills = sum(killed_at([*program, output], output, total * share) for share in (0.0, 0.3, 0.7))
    assert kills >= 2
    assert not killed_at([*program, output], output, math.inf)
    assert answers(output) == answers(undisturbed)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl", "undisturbed.jsonl"]


@pytest.mark.long
@pytest.mark.parametrize("name", ["out.jsonl", "out.npy"])
def test_the_command_survives_twenty_kills(tmp_path: Path, tiny_folder: Path, name: str) -> None:
    output, undisturbed = tmp_path / name, tmp_path / f"undisturbed-{name}"
    if name.endswith(".npy"):
        source = tmp_path / "in.txt"
        source.write_text("".join(f"text {number} of many\n" for number in range(20_000)))
    else:
        source = tmp_path / "in.jsonl"
        write_requests(source, 20_000)
    settings = ["--model", tiny_folder, "--dtype", "float32", "--tune", "off", "--deterministic"]
    command = [sys.executable, "-m", "staged_pool", "run-batch", "-i", source, *settings]
    assert not killed_at([*command, "-o", undisturbed], undisturbed, math.inf)
    total = undisturbed.stat().st_size
    luck = random.Random(name)
    kills = sum(
        killed_at([*command, "-o", output, "--resume"], output, total * share)
        for share in sorted(luck.random() for _ in range(20))
    )
    assert kills >= 15
    assert not killed_at([*command, "-o", output, "--resume"], output, math.inf)
    if name.endswith(".npy"):
        assert np.array_equal(np.load(output), np.load(undisturbed))
    else:
        assert answers(output) == answers(undisturbed)
