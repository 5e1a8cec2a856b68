"""The table of faults in README.md, held against the names of tests."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent


def test_every_row_has_a_test_and_every_test_a_row() -> None:
    rows = {int(number) for number in re.findall(r"^\| (\d+) \|", HERE.joinpath("README.md").read_text(), re.MULTILINE)}
    tested: set[int] = set()
    for path in HERE.glob("test_*.py"):
        for first, word, last in re.findall(r"def test_rows?_(\d+)(?:_(to|and)_(\d+))?", path.read_text()):
            tested |= set(range(int(first), int(last) + 1)) if word == "to" else {int(first), int(last or first)}
    assert rows == set(range(1, 61))
    assert tested == rows
