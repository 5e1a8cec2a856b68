"""Medians, ratios and spreads of what was seen in several rounds."""

from __future__ import annotations

from pathlib import Path

from perf.peers.catalogue import PEERS
from perf.peers.comparison import Contender, Spread, failures, ratios, tables
from perf.peers.inputs import Scenario
from perf.peers.plots import plot
from perf.peers.run import comparisons, titled
from perf.peers.visits import Cell, CoresUsed, Level, Visit
from perf.tools.load import LoadOutcome, ProbeOutcome
from perf.tools.openloop import ArrivalsOutcome

CLIENTS: dict[Scenario, tuple[int, ...]] = {
    "s1": (),
    "m8": (4,),
    "x64": (),
    "rank": (),
    "images": (),
    "photos": (),
    "captions": (),
}


def visit_with(requests_per_s: int, *, failed: int = 0) -> Visit:
    load = LoadOutcome(latencies_ms=[10.0] * requests_per_s, failed=failed, elapsed_s=1.0)
    level = ArrivalsOutcome(offered=20, accepted_ms=[5.0] * 10, timeouts=4, other_statuses={503: 6}, accepted_s=1.0)
    seen = Visit(start_s=2.0, least_cosine=0.999, processes=1, rss_mb=100, pss_mb=90)
    seen.cells["m8", 4] = Cell(load, ProbeOutcome([1.0]), CoresUsed(server=1.5, others=0.1))
    seen.levels[2.0] = Level(20.0, 10.0, level, ProbeOutcome([1.0]), CoresUsed(server=1.5, others=0.1))
    return seen


def contender(place: int, *visits: Visit | None) -> Contender:
    return Contender(PEERS[place], "float32", "1.0", visits)


def test_a_spread_leaves_out_rounds_without_a_value() -> None:
    assert Spread.of([3.0, None, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
    assert Spread.of([None]) is None
    assert [Spread.cell(s) for s in (Spread(2.0, 1.0, 3.0), Spread(2.0, 2.0, 2.0), None)] == ["2 (1 .. 3)", "2", "-"]


def test_a_ratio_is_that_of_the_same_round() -> None:
    assert ratios([10.0, None, 30.0, 5.0], [20.0, 20.0, None, 0.0]) == [0.5, None, None, None]


def test_rates_count_texts_and_ratios_are_taken_round_by_round() -> None:
    ours, theirs = contender(0, visit_with(10), visit_with(100)), contender(1, visit_with(5), visit_with(200))
    closed, opened, servers = tables([ours, theirs], CLIENTS, "All")
    assert [row[:4] for row in closed.rows] == [
        ["staged-pool, 4", "440 (80 .. 800)", "1", "1.50"],
        ["infinity, 4", "820 (40 .. 1600)", "1.25 (0.5 .. 2)", "1.50"],
    ]
    row = dict(zip(opened.columns, opened.rows[1], strict=True))
    assert (row["server, load"], row["of capacity"], row["time-outs"], row["other"]) == ("infinity, 2x", "1", "8", "12")
    assert row["quick again after s"] == "never"
    assert [row[0] for row in servers.rows] == ["staged-pool", "infinity"]


def test_a_server_that_was_never_measured_is_in_no_table() -> None:
    for table in tables([contender(0, visit_with(10)), contender(1, None)], CLIENTS, "All"):
        assert [row[0].split(",")[0] for row in table.rows] == ["staged-pool"]


def test_answers_that_are_no_success_are_counted_in_the_table() -> None:
    closed, *_ = tables([contender(0, visit_with(10, failed=3))], CLIENTS, "All")
    assert dict(zip(closed.columns, closed.rows[0], strict=True))["failed"] == "3"


def test_the_same_failure_of_several_rounds_is_named_once() -> None:
    seen = [visit_with(10), visit_with(10)]
    for one in seen:
        one.failures["x64, 4 clients"] = "the server closed the connection"
    assert list(failures(contender(1, *seen))) == [
        "infinity (float32), x64, 4 clients: the server closed the connection"
    ]


def test_a_table_is_written_as_markdown_under_its_title() -> None:
    *_, servers = tables([contender(0, visit_with(10))], CLIENTS, "All")
    title, _, head, marks, row, *_ = servers.markdown().splitlines()
    assert title == "### All: the servers"
    assert head.count("|") == marks.count("|") == row.count("|") == len(servers.columns) + 1


def test_the_image_names_every_server_that_was_measured(tmp_path: Path) -> None:
    plot([contender(0, visit_with(10)), contender(1, visit_with(5))], CLIENTS, "All", tmp_path / "all.svg")
    drawn = (tmp_path / "all.svg").read_text()
    assert "staged-pool (float32)" in drawn
    assert "infinity (float32)" in drawn


def test_float32_is_compared_unless_it_is_left_out_and_is_not_the_best_anyway() -> None:
    assert [*comparisons("bfloat16", float32=True).values()] == ["bfloat16", "float32"]
    assert comparisons("bfloat16", float32=False) == {"Each at its best": "bfloat16"}
    for also in (True, False):
        assert comparisons("float32", float32=also) == {"All in float32": "float32"}


def test_the_title_says_that_a_neighbour_was_busy() -> None:
    (closed, *_) = tables([contender(0, visit_with(10))], CLIENTS, titled("All", neighbour=True))
    assert closed.title.startswith("All, with a busy loop on each core: ")
    assert titled("All", neighbour=False) == "All"
