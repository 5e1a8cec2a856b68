"""Our server beside others on one device: ratios, failures, commands, and a short run on the CPU."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from perf.gpu.beside import DOCUMENTS, LOADS, beside
from perf.gpu.rivals import AGREED, OURS, rivals
from perf.gpu.standings import Cell, Figures, Standings
from perf.tools.load import LoadOutcome
from perf.tools.report import Record

CELL = Cell("m8", 16)


@pytest.fixture
def nothing_blocks_the_event_loop() -> None:
    """Allow blocking: these measurements do."""


def _outcome(requests: int, *, failed: int = 0) -> LoadOutcome:
    return LoadOutcome([10.0] * requests, failed=failed, elapsed_s=1.0)


def _standings(**requests: int) -> Standings:
    """Return the standings after one round of a second; names have `_` for `-`."""
    standings = Standings(OURS)
    for name, count in requests.items():
        standings.figures(CELL, name.replace("_", "-")).add(_outcome(count), 8)
    return standings


def test_a_rate_is_the_median_of_the_rounds_in_texts() -> None:
    figures = Figures()
    for requests in (10, 30, 20):
        figures.add(_outcome(requests), 8)
    assert figures.rate == 160
    assert len(figures.latencies_ms) == 60


@pytest.mark.parametrize("outcome", [_outcome(5, failed=1), _outcome(0), LoadOutcome([1.0], unanswered=2)])
def test_a_round_with_missing_answers_is_no_figure(outcome: LoadOutcome) -> None:
    with pytest.raises(RuntimeError, match="requests failed"):
        Figures().add(outcome, 1)


def test_a_target_holds_ours_against_the_fastest_of_its_kind() -> None:
    standings = _standings(staged_pool=30, infinity_sdpa=20, infinity_bettertransformer=40, naive_inline=10)
    record = Record({})
    standings.keep_targets(record, "MiniLM", {"infinity": "Infinity", "naive": "naive"})
    assert {target.name: (target.value, target.met) for target in record.targets} == {
        "MiniLM, m8, 16 clients: ahead of Infinity": (0.75, False),
        "MiniLM, m8, 16 clients: ahead of naive": (3.0, True),
    }


def test_servers_without_figures_have_no_ratio_and_no_target() -> None:
    standings = _standings(naive_inline=10)
    standings.figures(CELL, OURS)
    record = Record({})
    standings.keep_targets(record, "MiniLM", {"naive": "naive"})
    assert standings.ratio(CELL, "naive-inline") is None
    assert record.targets == []


def test_rows_have_figures_by_cell_and_then_the_failures() -> None:
    standings = _standings(staged_pool=30, naive_inline=20)
    standings.figures(Cell("s1", 1), OURS).add(_outcome(7), 1)
    standings.figures(CELL, "infinity-sdpa").add(_outcome(60), 8)
    standings.failures["infinity-bettertransformer"] = "it ended with code 1:\n  File 1\nRuntimeError: no kernel"
    assert standings.rows() == [
        ["m8, 16: staged-pool", "240", "10", "10", "1", "-"],
        ["m8, 16: naive-inline", "160", "10", "10", "1", "1.50"],
        ["m8, 16: infinity-sdpa", "480", "10", "10", "1", "0.50"],
        ["s1, 1: staged-pool", "7", "10", "10", "1", "-"],
        ["infinity-bettertransformer: it ended with code 1: RuntimeError: no kernel", "-", "-", "-", "0", "-"],
    ]


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_every_server_gets_the_same_model_device_and_dtype(device: str) -> None:
    servers = rivals(Path("/model"), torch.device(device), "bfloat16", Path("/python"))
    assert [one.name for one in servers] == [
        OURS, "infinity-bettertransformer", "infinity-sdpa", "naive-inline", "naive-threadpool",
    ]  # fmt: skip
    for server in servers:
        said = [*server.command, *server.variables.values()]
        assert {"/model", "bfloat16"} <= set(said)
        place = device.split(":") if server.name.startswith("infinity") else [device]
        assert set(place) <= set(said)
        assert "0.0.0.0" not in said


@pytest.mark.long
def test_a_run_measures_ours_and_the_naive_servers_and_goes_on_without_infinity(tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho there is no infinity_emb here >&2\nexit 3\n")
    broken.chmod(0o755)
    beside(device="cpu", infinity=broken, quick=True, results=tmp_path / "results")
    found = json.loads((tmp_path / "results" / "gpu-beside.json").read_text())
    small = found["results"]["small"]
    measured = {(one["load"], one["server"]): one["texts_per_s"] for one in small["cells"]}
    assert measured.keys() == {
        (load, server) for load in (*LOADS, DOCUMENTS) for server in (OURS, "naive-inline", "naive-threadpool")
    }
    assert all(rate > 0 and math.isfinite(rate) for rates in measured.values() for rate in rates)
    assert min(small["cosines"].values()) >= AGREED
    assert small["failures"].keys() == {"infinity-bettertransformer", "infinity-sdpa"}
    assert all("there is no infinity_emb here" in reason for reason in small["failures"].values())
    assert len(found["targets"]) == 4
