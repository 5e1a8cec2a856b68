"""Tables and plots of reports."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from staged_pool.api.bench.plots import check_matplotlib, draw
from staged_pool.api.bench.table import number, render, spread
from staged_pool.stages.errors import ConfigError


@pytest.fixture(autouse=True)
def nothing_blocks_the_event_loop() -> None:
    """These tests have no event loop, and write files."""


def around(value: float) -> dict[str, float]:
    return {"value": value, "low": value * 0.9, "high": value * 1.1}


def level(rate: float | None, **changed: Any) -> dict[str, Any]:
    plan = "4 client(s)" if rate is None else f"{rate:g} requests/s"
    rate = rate or 40.0
    answered = min(rate, 100.0)
    whole = {
        "plan": plan,
        "planned_rate": None if "client" in plan else rate,
        "mode": "closed" if "client" in plan else "open",
        "offered_rate": None if "client" in plan else rate,
        "clients": 4 if "client" in plan else None,
        "seconds": 30.0,
        "is_whole": True,
        "requests": {"due": int(rate * 30), "answered": int(answered * 30), "late": 0, "failed": 0,
                     "rejected": int((rate - answered) * 30), "not_sent": 0, "unfinished": 0},
        "rates": {name: around(answered) for name in ("answered", "goodput", "items")} | {"tokens": None},
        "latency_ms": {"samples": 3000, "mean": 30.0, "p50": rate, "p90": rate * 2, "p99": around(rate * 3),
                       "max": rate * 4, "p50_rounds": around(rate)},
        "rejected_p50_ms": None,
        "kinds": {},
        "stages_ms": {"parse": 1.0, "queue": rate / 10, "device": 5.0, "hook_load": 2.0, "rest": 0.5},
        "generator": {"lateness_p50_ms": 0.1, "lateness_p99_ms": 0.9, "cpu_ms_per_request": 0.15, "connections": 9,
                      "resent": 0, "is_bottleneck": False},
        "server": {"batches": 10, "items": 100, "coalesced_items": 3, "items_per_batch": 10.0},
        "rounds": [],
        "timeline": [{"at_s": second, "due": 40, "answered": 39, "rejected": second % 2, "failed": 0, "p50_ms": 5.0,
                      "p90_ms": 9.0, "max_ms": None if second == 3 else 20.0} for second in range(8)],
        "sent": {"200": int(answered * 30)},
    }  # fmt: skip
    return {**whole, **changed}


def report(*levels: Mapping[str, Any], **changed: Any) -> dict[str, Any]:
    whole = {
        "format": "staged-pool-bench", "version": 1, "url": "http://host:1", "model": None, "slo_s": 0.5, "seed": 7,
        "inputs": "1 text(s) of 64 tokens", "warmup_s": 5.0, "round_s": 10.0, "interrupted": False, "knee": None,
        "outcomes": {"200": 9, "429": 1},
        "tokens_per_word": {"texts": {"per_word": 1.0, "per_text": 2.0, "source": "usage"}}, "levels": levels,
    }  # fmt: skip
    return {**whole, **changed}


SWEPT = report(level(50), level(100), level(200), knee={"held": 100.0, "over": 200.0})


def test_a_table_has_a_line_for_each_level() -> None:
    text = render(SWEPT)
    lines = text.splitlines()
    first = next(index for index, line in enumerate(lines) if line.startswith("load  "))
    rows = lines[first + 1 :]
    header = next(line for line in lines if "answers/s" in line)
    assert header.split() == [
        "load",
        "answers/s",
        "good/s",
        "rejected",
        "failed",
        "p50",
        "ms",
        "p90",
        "ms",
        "p99",
        "ms",
    ]
    assert [row.split()[0] for row in rows if "requests/s " in row and "Knee" not in row] == ["50", "100", "200"]
    assert "200 requests/s  100 [90-110]  100 [90-110]      3000       0" in text
    assert "Knee: the server keeps up with 100 requests/s, and not with 200 requests/s." in text
    assert "seed 7" in text
    assert "the server's choice" in text


def test_one_level_is_told_in_more_detail() -> None:
    text = render(report(level(None, kinds={
        "texts": {"latency_ms": {"p50": 5.0, "p99": None, "samples": 40}},
    })))  # fmt: skip
    assert "4 client(s)" in text
    assert "texts        p50 5 ms, p99 - ms, 40 answers" in text
    assert "stages       parse 1, queue 4, device 5, hook_load 2, rest 0.5 ms" in text
    assert "batches      10 of 10 items, 3 joined to equal ones" in text
    assert "late by 0.1 ms (p99 0.9 ms), 0.15 ms of CPU a request, 9 connections" in text


@pytest.mark.parametrize(
    ("changed", "whole", "said"),
    [
        ({"latency_ms": {**level(50)["latency_ms"], "p99": None, "samples": 412}}, {}, "(here at most 412)"),
        ({"generator": {**level(50)["generator"], "is_bottleneck": True, "lateness_p99_ms": 44.0}}, {},
         "The generator is the bottleneck: it was late by 44 ms (p99)."),
        ({}, {"outcomes": {"200": 5, "429": 6, "500": 7, "not sent": 8}}, "included: 7 x 500, 8 x not sent."),
        ({}, {"outcomes": {"not sent": 8}}, "more than --max-connections at once"),
        ({}, {"interrupted": True}, "stopped before its end"),
        ({}, {"knee": {"held": None, "over": 50.0}}, "keeps up with no rate that was tried"),
        ({}, {"tokens_per_word": {"texts": {"per_word": 1, "per_text": 0, "source": "assumed"}}}, "is assumed"),
    ],
)  # fmt: skip
def test_what_limits_the_numbers_is_said(changed: dict[str, Any], whole: dict[str, Any], said: str) -> None:
    assert said in render(report(level(50, **changed), **whole))
    assert said not in render(report(level(50)))


def test_a_report_without_levels_has_its_head() -> None:
    assert render(report()).startswith("server   http://host:1")


@pytest.mark.parametrize(
    ("value", "shown"), [(None, "-"), (0.01234, "0.0123"), (5.0, "5"), (99.96, "100"), (12345.6, "12,346")]
)
def test_numbers_are_short(value: float | None, shown: str) -> None:
    assert number(value) == shown


def test_a_range_of_one_value_is_left_out() -> None:
    assert spread({"value": 3.0, "low": 3.0, "high": 3.0}) == "3"
    assert spread(around(10.0)) == "10 [9-11]"
    assert spread(None) == "-"


def texts(path: Path) -> set[str]:
    return {element.text or "" for element in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")}


def test_a_sweep_has_all_plots(tmp_path: Path) -> None:
    paths = draw(SWEPT, tmp_path / "new" / "folder")
    assert [path.name for path in paths] == ["latency.svg", "goodput.svg", "stages.svg", "timeline.svg"]
    said = {path.stem: texts(path) for path in paths}
    assert {"p50", "p99 (95 %)", "limit of good answers", "latency, ms"} <= said["latency"]
    assert {"offered", "rejected (429)", "answers within 0.5 s", "last rate that held"} <= said["goodput"]
    assert {"parse", "queue", "device", "hook_load", "rest", "50", "100", "200"} <= said["stages"]
    assert {"100 requests/s", "p90", "max", "answered", "rejected"} <= said["timeline"]
    assert "failed" not in said["timeline"]
    again = draw(SWEPT, tmp_path / "again")
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in paths]


def test_one_level_has_the_plots_that_make_sense(tmp_path: Path) -> None:
    assert [path.name for path in draw(report(level(None)), tmp_path)] == ["stages.svg", "timeline.svg"]
    other = report(level(None, stages_ms=None), slo_s=None)
    assert [path.name for path in draw(other, tmp_path)] == ["timeline.svg"]
    empty = {**level(None)["requests"], "due": 0}
    assert draw(report(level(None, requests=empty)), tmp_path) == []


def test_a_sweep_of_few_answers_and_failures_has_plots(tmp_path: Path) -> None:
    few = {**level(50)["latency_ms"], "p99": None, "p50": None}
    failing = {**level(50)["requests"], "failed": 30}
    levels = [level(50, latency_ms=few, requests=failing, rates={"goodput": None}), level(100)]
    paths = draw(report(*levels, slo_s=None), tmp_path)
    assert "failed" in texts(paths[1])


def test_without_matplotlib_the_way_to_get_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    check_matplotlib()
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    monkeypatch.delitem(sys.modules, "matplotlib", raising=False)
    with pytest.raises(ConfigError, match=r"pip install 'staged-pool\[bench\]'"):
        check_matplotlib()
