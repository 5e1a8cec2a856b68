"""Progress of loads: its state, its events, and the context in which loads report."""

from __future__ import annotations

import pytest
import structlog

from staged_pool.runtime.load_progress import LoadPhase, LoadProgress, LoadStatus, load_progress, reporting_loads


def sentence(progress: LoadProgress) -> str:
    """Return the state in words; empty if there is none."""
    return "" if progress.status is None else progress.status.sentence


def test_a_phase_is_seen_while_it_runs_and_logged_at_both_ends(logged: list[structlog.typing.EventDict]) -> None:
    seen: list[LoadStatus | None] = []
    progress = LoadProgress(seen.append)
    with progress.phase("m", LoadPhase.WEIGHTS):
        assert sentence(progress) == "reading the weights of m"
    assert sentence(progress) == ""
    assert seen == [LoadStatus("m", LoadPhase.WEIGHTS), None]
    assert [(event["event"], event["phase"]) for event in logged] == [
        ("model.phase_began", "weights"),
        ("model.phase_ended", "weights"),
    ]
    assert logged[1]["seconds"] >= 0


def test_a_phase_that_fails_does_not_end_in_the_log(logged: list[structlog.typing.EventDict]) -> None:
    progress = LoadProgress()
    with pytest.raises(KeyError), progress.phase("m", LoadPhase.WARM_UP):
        raise KeyError
    assert sentence(progress) == ""
    assert [event["event"] for event in logged] == ["model.phase_began"]


def test_a_download_begins_with_its_first_bytes(logged: list[structlog.typing.EventDict]) -> None:
    progress = LoadProgress()
    with progress.download("org/m") as moved:
        moved(0, 0)
        assert sentence(progress) == ""
        moved(1, 3)
        assert sentence(progress) == "downloading org/m, 33 %"
        moved(9, 3)  # bytes of the network may be more than those of the files
        assert sentence(progress) == "downloading org/m, 100 %"
    assert [event.get("bytes") for event in logged] == [None, 3]


def test_a_model_in_the_cache_has_no_download(logged: list[structlog.typing.EventDict]) -> None:
    with LoadProgress().download("org/m"):
        pass
    assert logged == []


def test_loads_report_to_the_progress_of_their_context() -> None:
    progress = LoadProgress()
    with reporting_loads(progress):
        assert load_progress() is progress
    assert load_progress() is not progress
