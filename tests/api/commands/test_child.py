"""A child: its handlers of signals come first, and whatever ends it unasked, its exit status is not 0."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import io, pickle, sys
from staged_pool.api.commands import child_run
from staged_pool.api.commands.process_config import ProcessConfig
from staged_pool.api.config import ServerConfig
from staged_pool.api.fleet.processes import Files

def ending(settings):
    async def program():
        raise {error}
    return program

child_run._program = ending
settings = child_run.ChildSettings(
    name="front-1", process=ProcessConfig(), server=ServerConfig(), models=[], pipelines=[], files=Files(0, 0, 0),
)
sys.stdin = io.TextIOWrapper(io.BytesIO(pickle.dumps(settings)))
child_run.run_child()
"""


@pytest.mark.parametrize("error", ["SystemExit(0)", "KeyboardInterrupt", "ValueError('mine')", "GeneratorExit"])
def test_a_child_that_ends_unasked_has_an_exit_status_that_says_so(error: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(error=error)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "process.failed" in done.stderr


def test_a_child_imports_nothing_slow_before_its_handlers_are_set() -> None:
    program = (
        "import sys; from staged_pool.api.commands import child; print(*{'anyio', 'click', 'torch'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
