"""A bar of progress: its rate and the time left are those of the inputs, and not of its last steps."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from staged_pool.runtime.progress import UNKNOWN_TOTAL, reporting


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def shown(capsys: pytest.CaptureFixture[str], steps: Sequence[tuple[float, int]], total: int | None) -> str:
    """Draw a bar; each step is the seconds until it and the inputs that are done in it."""
    clock = Clock()
    with reporting(True, total, clock) as advance:
        for seconds, count in steps:
            clock.now += seconds
            advance(count)
    found = capsys.readouterr()
    assert found.out == ""
    return found.err


@pytest.mark.parametrize(
    "steps",
    [[(2.0, 100)], [(1.0, 50), (1.0, 50)], [(1.9, 1), (0.001, 98), (0.099, 1)], [(0.5, 25)] * 4],
    ids=["one request", "two", "nearly all at once", "four"],
)
def test_the_rate_is_that_of_all_inputs_since_the_first_went_in(
    capsys: pytest.CaptureFixture[str], steps: Sequence[tuple[float, int]]
) -> None:
    text = shown(capsys, steps, 100)
    assert "100/100" in text
    assert "50/s" in text
    assert "0:00:02" in text  # behind the last input: the time of all


def test_the_time_left_is_at_that_rate(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal, which sees each step
    text = shown(capsys, [(2.0, 20), (2.0, 20)], 100)
    assert "20/100 10/s 0:00:08" in _plain(text)
    assert "40/100 10/s 0:00:06" in _plain(text)


def test_without_a_total_there_is_a_rate_and_no_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, [(2.0, 20)], None)
    assert "10/s" in text
    assert "-:--:--" in text


def test_in_a_notebook_the_bar_is_text(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    text = shown(capsys, [(2.0, 100)], 100)
    assert "50/s" in text


def test_a_function_gets_the_number_done_and_the_total() -> None:
    told: list[tuple[int, int]] = []
    with reporting(lambda done, total: told.append((done, total)), None) as advance:
        advance(2)
        advance(3)
    assert told == [(2, UNKNOWN_TOTAL), (5, UNKNOWN_TOTAL)]


def _plain(text: str) -> str:
    import re

    return re.sub(r"\s+", " ", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text))
