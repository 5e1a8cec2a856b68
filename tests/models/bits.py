"""Digests of an engine's vectors for 32 texts in several batches, printed by a process.

The argument is a model folder. Prints one line of JSON: by dtype and by whether the engine is deterministic.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from pydoc_data.topics import topics
from typing import Any

import anyio
import numpy as np
from numpy.typing import NDArray

from staged_pool.runtime.config import DType, EngineConfig
from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.engine.open import open_engine

Vectors = NDArray[np.float32]

WORDS = " ".join(topics.values()).split()
TEXTS = [" ".join(WORDS[n * 97 : n * 97 + 1 + n * n % 31]) for n in range(32)]
SCORED = 9
"""Texts that are compared with the first one."""
RESTS = 8
"""Texts that follow a rest."""
RESTED_S = 0.05
"""After which cores that computed have long been given to others."""


def digest(vectors: Vectors) -> str:
    return hashlib.sha256(vectors.tobytes()).hexdigest()


async def alone(engine: Engine, texts: Sequence[str] = TEXTS, *, rest_s: float = 0.0) -> Vectors:
    found = []
    for text in texts:
        await anyio.sleep(rest_s)
        found.append((await engine.embed([text])).embeddings[0])
    return np.stack(found)


async def at_once(engine: Engine) -> Vectors:
    """Each text in a request of its own, all at the same time."""
    found: list[Any] = [None] * len(TEXTS)

    async def ask(place: int) -> None:
        found[place] = (await engine.embed([TEXTS[place]])).embeddings[0]

    async with anyio.create_task_group() as group:
        for place in range(len(TEXTS)):
            group.start_soon(ask, place)
    return np.stack(found)


async def compare(folder: str, dtype: DType, *, deterministic: bool) -> dict[str, Any]:
    # A busy machine is no overload: all texts are wanted, however long they take.
    config = EngineConfig(model=folder, dtype=dtype, deterministic=deterministic, target_delay_s=600.0)
    async with open_engine(config) as engine:
        one_by_one = await alone(engine)
        together = (await engine.embed(TEXTS)).embeddings
        beside = await at_once(engine)
        rested = await alone(engine, TEXTS[-RESTS:], rest_s=RESTED_S)
        scores = (await engine.score(TEXTS[0], TEXTS[:SCORED])).scores
        scored = [(await engine.score(TEXTS[0], [text])).scores[0] for text in TEXTS[:SCORED]]
    cosines = (one_by_one * together).sum(axis=1)
    return {
        "alone": digest(one_by_one),
        "rested": digest(np.concatenate([one_by_one[:-RESTS], rested])),
        "together": digest(together),
        "at once": digest(beside),
        "scores": digest(np.asarray(scores, np.float32)),
        "scores alone": digest(np.array(scored, np.float32)),
        "apart": float(max(np.abs(one_by_one - each).max() for each in (together, beside))),
        "cosine": float(cosines.min()),
    }


async def main() -> None:
    found = {}
    dtypes: tuple[DType, ...] = ("float32", "bfloat16")
    for dtype in dtypes:
        for deterministic in (False, True):
            kind = f"{dtype}, {'deterministic' if deterministic else 'usual'}"
            found[kind] = await compare(sys.argv[1], dtype, deterministic=deterministic)
    print(json.dumps(found))


if __name__ == "__main__":
    sys.exit(anyio.run(main))
