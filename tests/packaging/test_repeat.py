"""The command that repeats tests: it tells which of them fail by chance, and how often."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from tests import repeat

FILE = """
from pathlib import Path

import pytest

ROUND = Path(__file__).with_name("rounds")


def test_that_passes():
    pass


@pytest.mark.parametrize("kind", ["[odd]"])
def test_by_chance(kind):
    ROUND.open("a").write("x")
    assert ROUND.stat().st_size != 2, "the second round"
"""


def test_it_counts_the_rounds_in_which_a_test_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "test_chance.py").write_text(FILE)
    assert repeat.main([str(tmp_path), "--rounds", "2", "--busy", "1"]) == 1
    told = capsys.readouterr().out
    assert "test_by_chance[[odd]]" in told
    assert "1 of 2" in told
    assert "the second round" in told
    assert "test_that_passes" not in told
    left = [
        each for each in psutil.process_iter(["ppid", "cmdline"]) if "getppid" in " ".join(each.info["cmdline"] or [])
    ]
    assert os.getpid() not in [each.info["ppid"] for each in left]


def test_a_run_that_hangs_or_cannot_start_is_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "test_hang.py").write_text("import time\ndef test_that_hangs(): time.sleep(600)")
    assert repeat.main([str(tmp_path), "--rounds", "1", "--busy", "0", "--limit-s", "1"]) == 1
    assert "did not end within 1 s" in capsys.readouterr().out
    assert repeat.main([str(tmp_path / "missing.py"), "--rounds", "1", "--busy", "0"]) == 1
    assert "exit code 4" in capsys.readouterr().out
