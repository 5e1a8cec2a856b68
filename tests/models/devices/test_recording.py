"""Choice of the forwards that are recorded at load."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest
import torch

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.models.devices import accelerators
from staged_pool.runtime.models.devices.accelerators import record_forwards
from staged_pool.runtime.models.devices.launch import Replica
from staged_pool.runtime.models.load import load_model
from staged_pool.runtime.models.towers.image import ImageTower
from staged_pool.runtime.models.towers.text import TextTower
from staged_pool.runtime.models.transformer.speedups import Speedups
from tests.models.conftest import TinyFolder

T = TypeVar("T")


class Refusal:
    """A recorder for which each forward fails."""

    def __init__(self, device: torch.device) -> None:
        assert device.type == "cpu"

    def __call__(self, run: Callable[[], T]) -> tuple[Callable[[], object], T]:
        raise RuntimeError("not recorded here")


class Keeper:
    """Keeps the sizes that a model is asked to record."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tokens: list[int] = []
        self.images: list[int] = []
        monkeypatch.setattr(accelerators, "cuda_recorder", Refusal)
        monkeypatch.setattr(Speedups, "record", self._keep_tokens)
        monkeypatch.setattr(ImageTower, "record", self._keep_images)

    def _keep_tokens(self, recorder: object, buckets: object) -> None:
        assert isinstance(buckets, list)
        self.tokens = [bucket.tokens for bucket in buckets]

    def _keep_images(self, recorder: object, tokens: int) -> None:
        self.images.append(tokens)


def replica_of(tiny_folder: TinyFolder, kind: str) -> Replica:
    (replica,) = load_model(EngineConfig(model=str(tiny_folder(kind)), dtype="float32", device="cpu")).replicas
    return replica


def test_sizes_up_to_the_largest_batch_are_recorded(tiny_folder: TinyFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = Keeper(monkeypatch)
    record_forwards("tiny", replica_of(tiny_folder, "bert-mean"), 1300)
    assert keeper.tokens == [64, 128, 256, 512, 1024, 1280]


def test_forwards_that_take_longer_than_their_launch_are_not_recorded(
    tiny_folder: TinyFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = replica_of(tiny_folder, "clip")
    text, image = replica.towers["text"], replica.towers["image"]
    assert isinstance(text, TextTower)
    assert isinstance(image, ImageTower)
    keeper = Keeper(monkeypatch)
    monkeypatch.setattr(accelerators, "_RECORDED_WORK", 200 * text.parameters)
    record_forwards("tiny", replica, 4096)
    assert keeper.tokens == [64, 128]
    assert keeper.images == [200 * text.parameters // image.parameters]


def test_a_model_that_cannot_be_recorded_runs_all_the_same(
    tiny_folder: TinyFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerators, "cuda_recorder", Refusal)
    replica = replica_of(tiny_folder, "clip")
    record_forwards("tiny", replica, 4096)
    image = replica.towers["image"]
    assert isinstance(image, ImageTower)
    assert image.encoder.recorded == ()
    with torch.inference_mode():
        assert image.launch(image.sample_batch([1]))
