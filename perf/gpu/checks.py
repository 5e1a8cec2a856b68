"""Checks of a device's results: every way to run a forward, against padded float32 batches on the CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from perf.tools.jpegs import jpeg
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.model import ModelInput, Payload, Row
from staged_pool.runtime.models.encoder import Encoder
from staged_pool.runtime.models.kernels.self_check import TOLERANCE, difference
from staged_pool.runtime.models.load import load_model
from staged_pool.runtime.models.towers.text import TextTower
from staged_pool.runtime.models.transformer.packed_transformer import PackedTransformer
from staged_pool.runtime.requests import DENSE_ONLY, Image, Output, TextInput
from staged_pool.stages.work import Prepared

KINDS: Final = ("bert-mean", "modernbert-cls", "qwen3-embed-left")
"""Tiny models of the tests: an encoder, one with a sliding window, and a decoder with grouped heads."""

SEEING: Final = "clip"

_IMAGES: Final = 3


@dataclass(frozen=True, slots=True)
class Check:
    """Difference of one way of computing from the reference; see `difference`."""

    model: str
    way: str
    difference: float
    limit: float
    """Tolerance of the data type."""

    @property
    def passed(self) -> bool:
        return self.difference <= self.limit  # NaN is not


def check_texts(name: str, folder: Path, device: str, texts: Sequence[str]) -> Iterator[Check]:
    """Check texts, packed and padded, in float32 and the device's own type, computed and replayed."""
    given = [ModelInput(TextInput(text), DENSE_ONLY) for text in texts]
    base = EngineConfig(model=str(folder), offline=True, device=device)
    wanted = _vectors(load_model(_reference(base)), given)
    for way, config in {
        "packed, float32": replace(base, dtype="float32"),
        "padded, float32": replace(base, dtype="float32", attention="padded"),
        "packed, computed": replace(base, cuda_graphs=False),
        "packed, replayed": base,
    }.items():
        if way == "packed, replayed" and not device.startswith("cuda"):
            continue
        model = load_model(config)
        if way == "packed, replayed" and not text_transformer(model).recorded:
            yield Check(name, "packed, replayed: was not recorded, see the log", float("nan"), 0.0)
            continue
        for batching, parts in {"one batch": [given], "one by one": [[one] for one in given]}.items():
            found = np.concatenate([_vectors(model, part) for part in parts])
            yield _check(name, f"{way}, {batching}", model, found, wanted)


def check_images(folder: Path, device: str) -> Iterator[Check]:
    """Check images of several sizes, sent as bytes that the device scales."""
    given = [ModelInput(Image(jpeg("vga", seed)), DENSE_ONLY) for seed in range(_IMAGES)]
    base = EngineConfig(model=str(folder), offline=True, device=device)
    wanted = _vectors(load_model(_reference(base)), given)
    for way, config in {"float32": replace(base, dtype="float32"), "its own dtype": base}.items():
        model = load_model(config)
        yield _check(SEEING, f"images, {way}", model, _vectors(model, given), wanted)


def _reference(config: EngineConfig) -> EngineConfig:
    return replace(config, device="cpu", dtype="float32", attention="padded")


def _check(name: str, way: str, model: Encoder, found: NDArray[np.float32], wanted: NDArray[np.float32]) -> Check:
    limit = TOLERANCE[getattr(torch, model.card.dtype)]
    return Check(name, way, difference(torch.from_numpy(found), torch.from_numpy(wanted)), limit)


def _vectors(model: Encoder, given: Sequence[ModelInput]) -> NDArray[np.float32]:
    rows = model.forward(prepared(model, given))
    vectors = []
    for row in rows:
        if not isinstance(row, Row):
            raise row
        values = row.values[Output.DENSE]
        assert isinstance(values, np.ndarray)
        vectors.append(values / np.linalg.norm(values))
    return np.stack(vectors)


def text_transformer(model: Encoder) -> PackedTransformer:
    """Return the transformer of a model that reads texts."""
    tower = model.towers["text"]
    assert isinstance(tower, TextTower)
    return tower.transformer


def prepared(model: Encoder, given: Sequence[ModelInput]) -> list[Payload]:
    """Preprocess inputs to the payloads of a forward."""
    payloads: list[Payload] = []
    for one in model.preprocess(given):
        if not isinstance(one, Prepared):
            raise RuntimeError(f"an input of the measurement was rejected: {one}")
        payloads.append(one.payload)
    return payloads
