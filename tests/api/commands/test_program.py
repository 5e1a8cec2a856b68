"""The first steps of the program."""

from __future__ import annotations

import re
import signal
import subprocess
import sys

import pytest

from staged_pool.api.commands import process as program
from staged_pool.api.commands.process_config import Backend

_CRASHES = """
import mmap, os, signal, sys, tempfile
from staged_pool.api.commands.process import prepare_environment

def is_read_after_it_was_cut(signal_number):
    with tempfile.TemporaryFile() as weights:
        weights.write(bytes(1 << 16))
        weights.flush()
        mapped = mmap.mmap(weights.fileno(), 0)
        os.ftruncate(weights.fileno(), 0)
        return mapped[5000]

prepare_environment(offline=True)
kind = sys.argv[1]
is_read_after_it_was_cut(kind) if kind == "SIGBUS" else os.kill(os.getpid(), getattr(signal, kind))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="has no such signals")
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("SIGBUS", "Bus error"),
        ("SIGSEGV", "Segmentation fault"),
        ("SIGABRT", "Aborted"),
        ("SIGFPE", "Floating.point exception"),
        ("SIGILL", "Illegal instruction"),
    ],
)
def test_a_signal_that_ends_the_process_is_told_with_where_it_was(kind: str, said: str) -> None:
    ran = subprocess.run([sys.executable, "-c", _CRASHES, kind], capture_output=True, text=True, check=False)
    assert ran.returncode == -getattr(signal, kind)
    assert re.search(f"^Fatal Python error: {said}$", ran.stderr, re.MULTILINE)
    assert ("in is_read_after_it_was_cut" in ran.stderr) == (kind == "SIGBUS")


async def _switch_interval_s() -> None:
    assert sys.getswitchinterval() == pytest.approx(program.SWITCH_INTERVAL_S)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_threads_take_turns_often(backend: Backend) -> None:
    before_s = sys.getswitchinterval()
    try:
        program.run(backend, _switch_interval_s)
    finally:
        sys.setswitchinterval(before_s)
