"""Rounds that are kept from one sitting to the next."""

from __future__ import annotations

from pathlib import Path

import pytest

from perf.peers.kept import KeptRounds, OtherSettings
from perf.peers.visits import Cell, CoresUsed, Level, Visit
from perf.tools.load import LoadOutcome, ProbeOutcome
from perf.tools.openloop import ArrivalsOutcome

SETTINGS = {"plan": "short", "cpu": "this one"}


def a_visit() -> Visit:
    probe = ProbeOutcome([0.5], timeouts=1)
    cell = Cell(LoadOutcome([1.0, 2.5], failed=2, elapsed_s=0.1), probe, CoresUsed(others=0.1))
    level = Level(2.0, 4.0, ArrivalsOutcome(offered=3, other_statuses={503: 2}), probe, CoresUsed(others=0.2))
    return Visit(1.5, 0.999, {("m8", 4): cell}, {2.0: level}, {"images": level}, {"rank": "it hung"}, 2, 10.0, 9.0)


def test_rounds_come_back_as_they_were(tmp_path: Path) -> None:
    rounds = KeptRounds(SETTINGS, folder=tmp_path / "rounds")
    assert rounds.load() == []
    seen = ("staged-pool", "float32", a_visit())
    rounds.add("abc", [seen, ("vllm", "bfloat16", None)])
    rounds.add("def", [seen])
    first, second = KeptRounds(SETTINGS, folder=tmp_path / "rounds").load()
    assert (first.commit, second.commit) == ("abc", "def")
    assert list(first.visits) == [seen, ("vllm", "bfloat16", None)]
    rounds.clear()
    assert rounds.load() == []


@pytest.mark.parametrize("settings", [{"plan": "short", "cpu": "another"}, {"plan": "short"}])
def test_rounds_of_another_comparison_are_rejected(settings: dict[str, str], tmp_path: Path) -> None:
    KeptRounds(settings, folder=tmp_path).add("abc", [])
    with pytest.raises(OtherSettings, match=r"another cpu: .*, and now it is this one"):
        KeptRounds(SETTINGS, folder=tmp_path).load()


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "000.msgpack").write_bytes(b"\xff")
    with pytest.raises(OtherSettings, match=r"000\.msgpack cannot be read"):
        KeptRounds(SETTINGS, folder=tmp_path).load()
