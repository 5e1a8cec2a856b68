"""Tiny models made by code, and texts whose vectors are known and far apart."""

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
APART: Final = 4 * TOLERANCE
"""Least difference of the vectors of two texts, in their most different number."""


def tiny_model(folder: Path, kind: str = KIND, **settings: Any) -> EngineConfig:
    """Build a model in a folder, and return its settings as an `EngineConfig`."""
    from tests.models.tiny import build

    return EngineConfig(model=str(build(kind, folder)), dtype="float32", **{"torch_threads": 1, **settings})


def known_vectors(model: EngineConfig, count: int = TEXTS) -> Mapping[str, NDArray[np.float32]]:
    """Return texts of 1 to 6 words and their vectors, computed without a server.

    Raises:
        RuntimeError: Too few texts have vectors that are far apart.
    """
    from staged_pool import Pool

    chance = random.Random(1)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(chance.choices(letters, k=chance.randint(2, 9))) for _ in range(400)]
    texts = [" ".join(chance.choices(words, k=chance.randint(1, 6))) for _ in range(2 * count)]
    with Pool(model) as pool:
        vectors = np.asarray(pool.embed(texts).embeddings, np.float32)
    chosen: list[int] = []
    for place, vector in enumerate(vectors):
        if len(chosen) < count and (np.abs(vectors[chosen] - vector).max(axis=1) > APART).all():
            chosen.append(place)
    if len(chosen) < count:
        raise RuntimeError(f"only {len(chosen)} of {len(texts)} texts have vectors of their own")
    return {texts[place]: vectors[place] for place in chosen}
