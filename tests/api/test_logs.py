"""The form of log lines, and the things that never stand in them."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

from staged_pool.api.commands import logs

_CRASHES = """
from staged_pool.api.commands.logs import configure
from staged_pool.stages.log import get_logger

def crash(body):
    raise ValueError("a bug")

configure(format_={format!r})
try:
    crash("what " + "a caller wrote")
except ValueError:
    get_logger("test").exception("request.crashed")
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


_SAYS = """
from staged_pool.api.commands.logs import configure
from staged_pool.stages.log import get_logger

configure(level={level!r}, format_="json")
log = get_logger("test")
log.info("request.finished", status=200, path="/ü", other=object)
log.info("crashed", exc_info=ValueError("a bug"), number=1)
log.warning("request.finished", status=200, path="/ü", other=object)
"""


def test_the_short_way_of_a_line_writes_what_the_longer_one_does() -> None:
    lines = [json.loads(line) for line in said("info")]
    assert [list(line) for line in lines[::2]] == [["status", "path", "other", "event", "level", "timestamp"]] * 2
    assert [line.pop("level") for line in lines] == ["info", "info", "warning"]
    times = [line.pop("timestamp") for line in lines]
    assert times == sorted(times)
    assert all(time.endswith("Z") and datetime.fromisoformat(time).tzinfo is not None for time in times)
    assert lines[0] == lines[2]
    assert lines[1] == {"number": 1, "event": "crashed", "exception": "ValueError: a bug"}
    assert [json.loads(line)["level"] for line in said("warning")] == ["warning"]


def said(level: str) -> list[str]:
    run = subprocess.run([sys.executable, "-c", _SAYS.format(level=level)], capture_output=True, text=True, check=True)
    return run.stderr.splitlines()


_CHATTERS = """
from staged_pool.api.commands import logs
from staged_pool.stages.log import get_logger

logs.configure(format_={format!r})
log = get_logger("test")
for number in range({lines}):
    log.info("chatter", number=number, text="x" * 100)
print("went on", flush=True)
"""


def test_a_log_that_nobody_reads_holds_up_nobody_and_what_is_lost_of_it_is_counted() -> None:
    lines = 3 * logs.MAX_LINES
    with subprocess.Popen(
        [sys.executable, "-c", _CHATTERS.format(format="json", lines=lines)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "went on\n", "before anybody has read a line"
        events = [json.loads(line) for line in process.stderr]
        assert process.wait() == 0
    written = [event["number"] for event in events if event["event"] == "chatter"]
    lost = [event["lines"] for event in events if event["event"] == "log.lines_lost"]
    assert written == sorted(written)
    assert logs.MAX_LINES <= len(written) < lines
    assert len(written) + sum(lost) == lines


@pytest.mark.parametrize("format_", ["text", "json"])
def test_what_is_logged_last_is_written_before_the_process_ends(format_: str) -> None:
    program = _CHATTERS.format(format=format_, lines=100)
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stderr.count("chatter") == 100


def test_a_log_that_is_never_read_does_not_keep_the_process_from_ending() -> None:
    program = _CHATTERS.format(format="json", lines=2000)  # more than a pipe holds
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as process:
        assert process.wait() == 0


def test_a_log_on_a_full_disk_is_lost_and_nothing_else() -> None:
    program = _CHATTERS.format(format="json", lines=10)
    with open("/dev/full", "w", encoding="utf-8") as full:
        run = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=full, check=True)
    assert run.stdout == b"went on\n"


def test_the_error_that_ends_a_command_is_its_last_line(tmp_path: Path) -> None:
    ended = subprocess.run(
        [Path(sys.executable).with_name("staged-pool"), "check", str(tmp_path), "--log-level", "debug"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1].startswith("error: ")
