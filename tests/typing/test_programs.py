"""Programs of users, checked by two type checkers: each file here is one face of the library."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

CHECKERS = {
    "mypy": ["mypy", "--strict", str(HERE)],
    "pyright": ["pyright", "--pythonpath", sys.executable, "--project", str(HERE)],
}


@pytest.mark.parametrize("command", CHECKERS.values(), ids=CHECKERS)
def test_programs_of_users_have_the_types_that_they_say(command: list[str]) -> None:
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
