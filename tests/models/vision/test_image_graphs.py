"""Recorded forwards of images: the number for each batch, and replays equal to computed values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.models.load import load_model
from staged_pool.runtime.models.towers.image import ImageTower
from staged_pool.runtime.models.vision.image_encoder import ImageEncoder
from staged_pool.runtime.models.vision.image_graphs import COUNTS, ImageValues
from staged_pool.runtime.payloads import Pixels
from tests.models.conftest import TinyFolder


class Rerun:
    """A double of a CUDA graph: runs the recorded call again, into the values of the first call."""

    def __init__(self) -> None:
        self.replays = 0
        self.spoils = False
        self.sticks = False
        """A replay gives what the first one gave."""
        self.fails_at: int | None = None
        self.calls = 0

    def __call__(self, run: Callable[[], ImageValues]) -> tuple[Callable[[], object], ImageValues]:
        self.calls += 1
        if self.calls - 1 == self.fails_at:
            raise RuntimeError("out of memory")
        kept = ImageValues(*(None if values is None else values.clone() for values in run()))
        replayed = 0

        def replay() -> None:
            nonlocal replayed
            self.replays += 1
            replayed += 1
            if replayed > 1 and self.sticks:
                return
            for values, now in zip(kept, run(), strict=True):
                if values is not None and now is not None:
                    values.copy_(now + 10 * torch.randn_like(now) if self.spoils else now)

        return replay, kept


def tower_of(tiny_folder: TinyFolder, kind: str) -> ImageTower:
    tower = load_model(EngineConfig(model=str(tiny_folder(kind)), dtype="float32", device="cpu")).towers["image"]
    assert isinstance(tower, ImageTower)
    return tower


def images(tower: ImageTower, count: int) -> Sequence[Pixels]:
    sample, random = tower.samples[0], np.random.default_rng(count)
    shape = sample.values.shape
    return [replace(sample, values=random.integers(256, size=shape, dtype=np.uint8)) for _ in range(count)]


def values(encoder: ImageEncoder, given: Sequence[Pixels]) -> list[torch.Tensor]:
    found = encoder.encode(given)
    return [one.clone() for one in (found.hidden, found.own) if one is not None]


@pytest.mark.parametrize("kind", ["clip", "siglip", "vit-labels", "dinov2"])
@torch.inference_mode()
def test_replayed_images_are_computed_images(kind: str, tiny_folder: TinyFolder) -> None:
    tower = tower_of(tiny_folder, kind)
    batches = [images(tower, count) for count in (1, 3, 2, 4, 1)]
    computed = [values(tower.encoder, batch) for batch in batches]
    recorder = Rerun()
    assert tower.record(recorder, 4 * tower.sample_tokens) is None
    assert tower.encoder.recorded == (1, 2, 3, 4)
    recorder.replays = 0
    for batch, wanted in zip(batches, computed, strict=True):
        torch.testing.assert_close(values(tower.encoder, batch), wanted)
    assert recorder.replays == len(batches)


@torch.inference_mode()
def test_images_that_fit_no_recording_are_computed(tiny_folder: TinyFolder) -> None:
    tower = tower_of(tiny_folder, "clip")
    recorder = Rerun()
    assert tower.encoder.record(recorder, tower.samples[0], [2]) is None
    recorder.replays = 0
    values(tower.encoder, images(tower, 3))
    assert recorder.replays == 0
    values(tower.encoder, images(tower, 1))
    assert recorder.replays == 1


@pytest.mark.parametrize("broken", ["spoils", "sticks"])
@torch.inference_mode()
def test_a_recording_with_other_values_is_left_out(tiny_folder: TinyFolder, broken: str) -> None:
    tower = tower_of(tiny_folder, "clip")
    recorder = Rerun()
    setattr(recorder, broken, True)
    why = tower.record(recorder, 2 * tower.sample_tokens)
    assert why is not None
    assert "recorded for 2 images, gives other vectors" in why
    assert tower.encoder.recorded == ()
    recorder.replays = 0
    values(tower.encoder, images(tower, 2))
    assert recorder.replays == 0


@torch.inference_mode()
def test_the_other_numbers_stay_where_one_fails(tiny_folder: TinyFolder) -> None:
    tower = tower_of(tiny_folder, "clip")
    recorder = Rerun()
    recorder.fails_at = 1
    why = tower.record(recorder, 4 * tower.sample_tokens)
    assert why is not None
    assert "recorded for 3 images, fails: out of memory" in why
    assert tower.encoder.recorded == (1, 2, 4)


def test_images_of_any_shape_are_not_recorded(tiny_folder: TinyFolder) -> None:
    tower = tower_of(tiny_folder, "siglip2-naflex")
    recorder = Rerun()
    assert tower.record(recorder, 1000) is None
    assert recorder.calls == 0


def test_a_batch_of_images_computes_at_most_half_as_many_too_many() -> None:
    assert max(after / before for before, after in pairwise(COUNTS) if before > 1) == 1.5
