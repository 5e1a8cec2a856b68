"""Distinct texts with their right vectors, which the library computes without a server."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from perf.tools.client import Reply, post
from staged_pool import Pool

TEXTS: Final = 2000
WORDS: Final = ("man", "eat", "food", "girl", "play", "guitar", "river", "stone", "light", "paper", "green", "winter")
CLOSE: Final = 1e-3
"""Largest difference of a right number: batches of other sizes round differently."""
SEED: Final = 11


class _Row(msgspec.Struct):
    embedding: str


class _Answer(msgspec.Struct):
    data: list[_Row]


@dataclass(frozen=True, slots=True)
class KnownText:
    """A request with one text, and the vector that is its right answer."""

    request: bytes
    vector: NDArray[np.float32]

    def is_answered_by(self, reply: Reply) -> bool:
        """Return True if an answer with 200 has the right vector, and nothing else."""
        rows = msgspec.json.decode(reply.body, type=_Answer).data
        if len(rows) != 1:
            return False
        given = np.frombuffer(base64.b64decode(rows[0].embedding), np.float32)
        return given.shape == self.vector.shape and bool(np.abs(given - self.vector).max() < CLOSE)


def known_texts(model: Path, count: int = TEXTS) -> Sequence[KnownText]:
    """Return distinct texts for a model.

    Raises:
        RuntimeError: Two texts have vectors so close that a mix-up could pass for right.
    """
    rng = random.Random(SEED)
    texts: dict[str, None] = {}
    while len(texts) < count:
        texts[" ".join(rng.choices(WORDS, k=rng.randint(3, 10)))] = None
    with Pool(str(model), dtype="float32", torch_threads=1, offline=True) as pool:
        vectors = np.asarray(pool.embed(list(texts)).embeddings, np.float32)
    for place, vector in enumerate(vectors[:-1]):
        if np.abs(vectors[place + 1 :] - vector).max(axis=1).min() < 2 * CLOSE:
            raise RuntimeError("two texts have nearly the same vector; choose other words")
    return [
        KnownText(post("/v1/embeddings", json.dumps({"input": text, "encoding_format": "base64"}).encode()), vector)
        for text, vector in zip(texts, vectors, strict=True)
    ]
