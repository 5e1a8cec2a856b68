"""A tiny model made by code, with texts whose vectors are known and far apart."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from perf.tools.checked_load import TOLERANCE
from staged_pool.runtime.config import EngineConfig

KIND: Final = "bge-m3"
TEXTS: Final = 200
APART: Final = 20 * TOLERANCE
"""Least difference of the vectors of two texts, in their most different number."""


def tiny_model(folder: Path, **settings: Any) -> EngineConfig:
    """Build the model in a folder, and return its settings as an `EngineConfig`."""
    from tests.models.tiny import build

    return EngineConfig(model=str(build(KIND, folder)), dtype="float32", **{"torch_threads": 1, **settings})


def known_vectors(model: EngineConfig) -> Mapping[str, NDArray[np.float32]]:
    """Return texts of 1 to 10 words and their vectors, computed without a server."""
    from staged_pool import Pool

    chance = random.Random(1)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(chance.choices(letters, k=chance.randint(2, 9))) for _ in range(400)]
    texts = [" ".join(chance.choices(words, k=chance.randint(1, 10))) for _ in range(2 * TEXTS)]
    with Pool(model) as pool:
        vectors = pool.embed(texts).embeddings
    known: dict[str, NDArray[np.float32]] = {}
    for text, vector in zip(texts, vectors, strict=True):
        if all(np.abs(vector - other).max() > APART for other in known.values()):
            known[text] = vector
    return dict(list(known.items())[:TEXTS])
