"""Findings of fuzzing our own parsers; `python -m tests.fuzz.parsers` looks for more."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Final

import pytest

from tests.fuzz.parsers import CORPUS
from tests.fuzz.targets import TARGETS

INPUTS: Final = [(path.parent.name, path) for path in sorted(CORPUS.glob("*/*"))]

FREE_LINES: Final = 60_000
LINES_PER_BYTE: Final = 60
"""Lines of the targets and of the parsers that may run for an input: time that does not depend on the machine."""


class LinesRun:
    """Counts the lines of this project that run."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        if "staged_pool" not in frame.f_globals.get("__name__", ""):
            return None
        self.count += event == "line"
        return self


def lines_run(target: Callable[[bytes], None], data: bytes) -> int:
    lines, before = LinesRun(), sys.gettrace()
    gc.disable()  # finalizers of other tests' garbage would run, and fail, at the bottom of a deep recursion
    sys.settrace(lines)
    try:
        target(data)
    finally:
        sys.settrace(before)
        gc.enable()
    return lines.count


def test_every_target_has_inputs_to_begin_with() -> None:
    assert {name for name, _ in INPUTS} == set(TARGETS)


@pytest.mark.parametrize(("name", "path"), INPUTS, ids=lambda each: each if isinstance(each, str) else each.name)
def test_an_input_of_the_corpus_is_read_right(name: str, path: Path) -> None:
    data = path.read_bytes()
    assert lines_run(TARGETS[name], data) <= FREE_LINES + LINES_PER_BYTE * len(data)


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("unit", [b"\x00", b"\xff", b",", b'"', b"[", b"=", b"\r\n", b"\\", b"%", b"--b\r\n", b"\n"])
def test_work_grows_no_faster_than_the_input(name: str, unit: bytes) -> None:
    for beginning in (b"", next(path for target, path in INPUTS if target == name).read_bytes()):
        short, long = (beginning + unit * (size // len(unit)) for size in (2000, 16_000))
        taken = [lines_run(TARGETS[name], data) for data in (short, long)]
        assert taken[1] <= 10 * taken[0] + FREE_LINES
