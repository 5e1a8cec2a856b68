"""The exit status of a child: whatever ends it unasked, it is not 0."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import io, pickle, sys
from staged_pool.api.commands import child
from staged_pool.api.commands.process_config import ProcessConfig
from staged_pool.api.config import ServerConfig
from staged_pool.api.fleet.processes import Files

def ending(settings):
    async def program():
        raise {error}
    return program

child._program = ending
settings = child.ChildSettings(
    name="front-1", process=ProcessConfig(), server=ServerConfig(), models=[], pipelines=[], files=Files(0, 0, 0),
)
sys.stdin = io.TextIOWrapper(io.BytesIO(pickle.dumps(settings)))
child.main()
"""


@pytest.mark.parametrize("error", ["SystemExit(0)", "KeyboardInterrupt", "ValueError('mine')", "GeneratorExit"])
def test_a_child_that_ends_unasked_has_an_exit_status_that_says_so(error: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(error=error)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "process.failed" in done.stderr
