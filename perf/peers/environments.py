"""Virtual environments of the servers, each built once from the versions in `pins/`, except ours."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from perf.tools.servers import ROOT

ENVIRONMENTS: Final = ROOT / ".peers"
PINS: Final = Path(__file__).resolve().parent / "pins"

OURS: Final = "staged-pool"
"""Name of our own server, and of its environment.

It is an environment as for serving, not that of this command: transformers imports its test libraries if it finds them.
"""

BUILD_TIMEOUT_S: Final = 1800.0
LAST_LINES: Final = 5

_STAMP: Final = "built-of"


class BuildFailed(RuntimeError):
    """An environment cannot be built here; the message says why."""


def build(name: str, *, environments: Path = ENVIRONMENTS, pins: Path = PINS) -> Path:
    """Build an environment, and return its interpreter.

    An environment of the same pins, Python and arguments is reused. torch is installed first, with the arguments of the
    variable TORCH_PIP_ARGS, because its build depends on the machine. The rest is installed without dependencies: these
    may be a CUDA build, or a version that does not exist for this Python. Ours is installed as by `make serve`.

    Raises:
        BuildFailed: pip failed or took too long; the message has its last lines.
    """
    stop_at = time.monotonic() + BUILD_TIMEOUT_S
    folder = environments / name
    python, stamp, requirements = folder / "bin" / "python", folder / _STAMP, pins / f"{name}.txt"
    if name == OURS:  # make decides if it is up to date
        _run(["make", "-C", str(ROOT), "install", f"VENV={folder}", f"PYTHON={sys.executable}"], stop_at)
        return python
    torch_arguments = os.environ.get("TORCH_PIP_ARGS", "")
    made_of = f"{_digest(requirements)} {platform.python_version()} {torch_arguments}".strip()
    if stamp.exists() and stamp.read_text() == made_of:
        return python
    _run([sys.executable, "-m", "venv", "--clear", str(folder)], stop_at)
    install = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input", "install"]
    if torch := [line for line in requirements.read_text().splitlines() if line.startswith("torch==")]:
        _run([*install, "-c", str(requirements), *torch, *shlex.split(torch_arguments)], stop_at)
    _run([*install, "--no-deps", "-r", str(requirements)], stop_at)
    stamp.write_text(made_of)
    return python


def version_of(python: Path, package: str) -> str:
    """Return the version of a package in the environment of an interpreter."""
    ask = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"
    done = subprocess.run([str(python), "-c", ask, package], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _digest(requirements: Path) -> str:
    return hashlib.sha256(requirements.read_bytes()).hexdigest()


def _run(command: list[str], stop_at: float) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=max(0.0, stop_at - time.monotonic())
        )
    except subprocess.TimeoutExpired:
        raise BuildFailed(f"not built after {BUILD_TIMEOUT_S:g} s") from None
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise BuildFailed("\n".join(lines[-LAST_LINES:]))
