"""What the lines of the log look like, and what never stands in them."""

from __future__ import annotations

import subprocess
import sys

import pytest

_CRASHES = """
import structlog
from staged_pool.api.logs import configure

def crash(body):
    raise ValueError("a bug")

configure(format_={format!r})
try:
    crash("what " + "a caller wrote")
except ValueError:
    structlog.get_logger().exception("request.crashed")
    __import__("logging").getLogger("library").exception("crashed, too")
"""


@pytest.mark.parametrize("format_", ["text", "json"])
def test_a_traceback_shows_where_and_not_what_a_caller_sent(format_: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", _CRASHES.format(format=format_)], capture_output=True, text=True, check=True
    )
    assert run.stderr.count("ValueError: a bug") == 2
    assert "in crash" in run.stderr
    assert "what a caller wrote" not in run.stderr
