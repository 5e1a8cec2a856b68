"""Decision files: measured once, read at every start; a damaged file never ends a start."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.models.devices import kernel_choices as tuning
from staged_pool.runtime.models.devices import processor
from staged_pool.runtime.models.devices.kernel_choices import DecisionFile, Tuning, decision_folder
from staged_pool.runtime.models.load import load_model
from staged_pool.stages.errors import ConfigError
from tests.models.conftest import TinyFolder

Measure = Callable[[], int]


@pytest.fixture(autouse=True)
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which something may be measured, whatever else the tests share it with."""
    monkeypatch.setattr(tuning, "share_of_cores", lambda threads: 1.0)


class Stopwatch:
    """Measures something else each time."""

    def __init__(self) -> None:
        self.next = 1
        self.runs = 0

    def __call__(self) -> int:
        self.runs += 1
        self.next += 1
        return self.next - 1


def choose(choices: Tuning, measure: Measure, question: str = "how many") -> int:
    return choices.choose(question, table=100, measure=measure, allowed=lambda kept: type(kept) is int and kept < 1000)


def only_file(folder: Path) -> Path:
    (path,) = folder.glob("decisions-*.json")
    return path


def test_what_was_measured_once_decides_at_every_start(tmp_path: Path) -> None:
    measure = Stopwatch()
    answers = [choose(Tuning("auto", tmp_path / "cache"), measure) for _ in range(3)]
    assert (answers, measure.runs) == ([1, 1, 1], 1)
    assert choose(Tuning("auto", tmp_path / "cache"), measure, "something else") == 2


def test_again_measures_anew_once_a_load_and_keeps_that(tmp_path: Path) -> None:
    measure = Stopwatch()
    choose(Tuning("auto", tmp_path), measure)
    again = Tuning("again", tmp_path)
    assert [choose(again, measure), choose(again, measure)] == [2, 2]
    assert choose(Tuning("auto", tmp_path), measure) == 2


def test_off_measures_reads_and_writes_nothing(tmp_path: Path) -> None:
    measure = Stopwatch()
    choose(Tuning("auto", tmp_path / "cache"), measure)
    assert choose(Tuning("off", tmp_path / "cache"), measure) == 100
    assert choose(Tuning("off", tmp_path / "other"), measure) == 100
    assert measure.runs == 1
    assert not (tmp_path / "other").exists()


DAMAGED: dict[str, Callable[[dict[str, Any]], bytes]] = {
    "empty": lambda content: b"",
    "cut": lambda content: json.dumps(content).encode()[:-9],
    "binary": lambda content: b"\xff\x00\xfe" * 9,
    "deep": lambda content: b"[" * 100_000,
    "a list": lambda content: b"[1, 2]",
    "another format": lambda content: json.dumps(content | {"format": 0}).encode(),
    "another torch": lambda content: json.dumps(
        content | {"processor": content["processor"] | {"torch": "1.0"}}
    ).encode(),
    "no decisions": lambda content: json.dumps(content | {"decisions": 7}).encode(),
    "huge": lambda content: b" " * (tuning._MAX_BYTES + 1),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_or_foreign_file_is_ignored_with_a_line_and_written_anew(
    damage: str, tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    measure = Stopwatch()
    choose(Tuning("auto", tmp_path), measure)
    path = only_file(tmp_path)
    path.write_bytes(DAMAGED[damage](json.loads(path.read_text())))
    logged.clear()
    assert choose(Tuning("auto", tmp_path), measure) == 2
    assert {event["event"] for event in logged} == {"model.decisions_ignored"}
    assert choose(Tuning("auto", tmp_path), measure) == 2


@pytest.mark.parametrize("value", [True, "7", 5000, None, [1], 1.0])
def test_an_answer_that_cannot_be_one_is_measured_anew(value: Any, tmp_path: Path) -> None:
    measure = Stopwatch()
    choose(Tuning("auto", tmp_path), measure)
    path = only_file(tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"decisions": {"how many": value}}))
    assert choose(Tuning("auto", tmp_path), measure) == 2


def test_where_nothing_can_be_written_the_table_decides_and_nothing_is_measured(
    tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    (tmp_path / "cache").write_text("a file where the folder would be")
    measure, choices = Stopwatch(), Tuning("auto", tmp_path / "cache")
    assert [choose(choices, measure), choose(choices, measure, "another")] == [100, 100]
    assert measure.runs == 0
    assert [event["event"] for event in logged] == ["model.decisions_not_kept"]


def test_a_disk_that_is_full_once_something_was_measured_leaves_it_to_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: Any, target: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert choose(Tuning("auto", tmp_path), Stopwatch()) == 100
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


def test_a_file_that_cannot_be_written_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = Stopwatch()
    choose(Tuning("auto", tmp_path), measure)

    def read_only(file: DecisionFile) -> None:
        raise PermissionError(30, "Read-only file system")

    monkeypatch.setattr(DecisionFile, "prepare", read_only)
    choices = Tuning("auto", tmp_path)
    assert choose(choices, measure) == 1
    assert choose(choices, measure, "not in it") == 100


def test_a_folder_in_the_place_of_the_file_is_no_end(tmp_path: Path) -> None:
    DecisionFile(tmp_path).path.mkdir(parents=True)
    assert choose(Tuning("auto", tmp_path), Stopwatch()) == 100


def test_of_starts_at_once_the_first_that_has_measured_decides_for_all(tmp_path: Path) -> None:
    starts = 8
    meeting = threading.Barrier(starts, timeout=30)

    def start(number: int) -> tuple[int, int]:
        def measure() -> int:
            meeting.wait()  # all of them have found the file without an answer
            return number

        choices = Tuning("auto", tmp_path)
        return choose(choices, measure), choose(choices, lambda: number, f"of {number} alone")

    with ThreadPoolExecutor(starts) as pool:
        found = [*pool.map(start, range(starts))]
    assert len({shared for shared, _ in found}) == 1
    assert [own for _, own in found] == [*range(starts)]
    assert len(DecisionFile(tmp_path).read()) == 1 + starts  # none has lost what another wrote


def test_on_a_busy_machine_the_table_decides_and_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[dict[str, Any]]
) -> None:
    measure = Stopwatch()
    monkeypatch.setattr(tuning, "share_of_cores", lambda threads: 0.4)
    assert choose(Tuning("auto", tmp_path), measure) == 100
    assert [(event["event"], event["log_level"]) for event in logged] == [("model.not_measured", "info")]
    monkeypatch.setattr(tuning, "share_of_cores", lambda threads: 1.0)
    assert choose(Tuning("auto", tmp_path), measure) == 100
    assert choose(Tuning("again", tmp_path), measure) == 1


@pytest.mark.parametrize("platform", ["linux", "darwin", "win32"])
def test_the_folder_is_the_one_of_the_platform_unless_xdg_says_another(
    platform: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("LOCALAPPDATA", raising=False)
    own = {"linux": ".cache/staged-pool", "darwin": "Library/Caches/staged-pool"}
    home = tmp_path / own.get(platform, "AppData/Local/staged-pool/Cache")
    for said, wanted in (("/somewhere", Path("/somewhere/staged-pool")), ("relative", home), ("", home)):
        monkeypatch.setenv("XDG_CACHE_HOME", said)
        assert decision_folder() == wanted


def test_bfloat16_by_the_table_goes_by_what_the_processor_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "has_prepacked", lambda *_: True)
    found = []
    for able in (
        {"amx_bf16": True, "avx512_bf16": True, "cpu_name": "Intel"},
        {"avx512_bf16": True, "cpu_name": "AMD EPYC"},
        {"avx512_bf16": True, "cpu_name": "Intel"},
        {"avx2": True},
        {},
    ):
        monkeypatch.setattr(processor, "capabilities", lambda able=able: able)
        found.append(processor.bfloat16_usually_pays())
    assert found == [True, True, False, False, False]


def test_a_second_load_measures_nothing(
    tiny_folder: TinyFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[dict[str, Any]]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = EngineConfig(model=str(tiny_folder("bert-mean")), torch_threads=2)
    first = load_model(config)
    asked = {event["decisions"] for event in logged if event["event"] == "model.measured"}
    decisions = DecisionFile(tmp_path / "staged-pool").read()
    assert asked == {len(decisions)}
    assert [*decisions] == ["bfloat16"]
    logged.clear()
    second = load_model(config)
    assert not [event for event in logged if event["event"] == "model.measured"]
    assert second.card.dtype == first.card.dtype
    assert second.card.forward_workers == first.card.forward_workers
    assert DecisionFile(tmp_path / "staged-pool").read() == decisions


def test_deterministic_engines_measure_nothing() -> None:
    with pytest.raises(ConfigError, match="tune='again': with deterministic nothing is measured"):
        EngineConfig(deterministic=True, tune="again")
    with pytest.raises(ConfigError, match="tune='never': must be one of auto, off, again"):
        EngineConfig(tune="never")  # type: ignore[arg-type]
