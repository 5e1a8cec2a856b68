"""Checks of tiny models, with doubles of the GPU's kernel and of recordings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from perf.gpu import tiny_models
from perf.gpu.findings import Finding
from perf.gpu.loaded import text_transformer
from perf.gpu.tiny_models import TinyModels
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.models.encoder import Encoder
from staged_pool.runtime.models.load import load_model
from staged_pool.runtime.models.transformer.cuda_graphs import BUCKETS
from staged_pool.runtime.models.transformer.speedups import Speedups
from tests.models.transformer.test_graphs import Rerun

pytestmark = pytest.mark.usefixtures("varlen_on_cpu")


RECORDED = [bucket for bucket in BUCKETS if bucket.tokens in (64, 256, 1024, 2048)]
"""A few sizes that hold the inputs. On a CPU each recording runs its whole size."""


def _recording(recorder: Rerun) -> Callable[[EngineConfig], Encoder]:
    """Load models whose packed forwards are recorded, as they are on a GPU."""

    def load(config: EngineConfig) -> Encoder:
        model = load_model(config)
        if config.attention == "auto":
            transformer = text_transformer(model)
            assert Speedups(transformer, model.card.max_tokens).record(recorder, RECORDED) is None
        return model

    return load


def _by_way(findings: list[Finding]) -> dict[str, list[Finding]]:
    return {way: [one for one in findings if one.way == f"float32, {way}"] for way in tiny_models.WAYS}


@pytest.mark.parametrize("kind", sorted(tiny_models.FASTEST))
def test_each_way_is_checked_for_all_outputs(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    recorder = Rerun()
    monkeypatch.setattr(tiny_models, "load_model", _recording(recorder))
    findings = TinyModels(tmp_path, "cpu", threads=1)(kind)
    assert [finding.line() for finding in findings if not finding.right] == []
    subjects = {way: {one.subject for one in found} for way, found in _by_way(findings).items()}
    assert len(subjects["padded"]) == 8
    assert all(found == subjects["padded"] for found in subjects.values())


def test_a_replay_that_gives_other_vectors_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    recorder = Rerun()
    load = _recording(recorder)

    def load_and_spoil(config: EngineConfig) -> Encoder:
        recorder.spoil = False
        model = load(config)
        recorder.spoil = True
        return model

    monkeypatch.setattr(tiny_models, "load_model", load_and_spoil)
    ways = _by_way(TinyModels(tmp_path, "cpu", threads=1)("bert-mean"))
    assert {way for way, found in ways.items() if not all(one.right for one in found)} == {"replayed"}


def test_a_model_that_must_be_recorded_and_is_not_is_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tiny_models, "cuda_recorder", lambda device: _refusing())
    (finding,) = _by_way(TinyModels(tmp_path, "cpu", threads=1)("bert-mean"))["replayed"]
    assert not finding.right
    assert "cannot be recorded" in finding.note


def test_a_model_that_need_not_be_recorded_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tiny_models, "cuda_recorder", lambda device: _refusing())
    (finding,) = _by_way(TinyModels(tmp_path, "cpu", threads=1)("colbert-pylate"))["replayed"]
    assert finding.right
    assert "cannot be recorded" in finding.note


def test_a_model_that_cannot_be_made_is_one_wrong_row(tmp_path: Path) -> None:
    (tmp_path / "bert-mean").mkdir()
    (finding,) = TinyModels(tmp_path, "cpu", threads=1)("bert-mean")
    assert not finding.right
    assert finding.note.startswith("FileExistsError")


def _refusing() -> Rerun:
    recorder = Rerun()
    recorder.error = RuntimeError("this forward cannot be recorded")
    return recorder
