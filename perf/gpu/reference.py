"""Vectors of a model by the reference: padded float32 batches on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from perf.gpu.loaded import prepared
from perf.gpu.traffic import Vectors
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.model import ModelInput
from staged_pool.runtime.models.load import load_model
from staged_pool.runtime.payloads import Row
from staged_pool.runtime.requests import DENSE_ONLY, MODEL_MAX, Output, TextInput

_TOKENS: Final = 2048
"""Tokens of one forward, with padding; a longer text is alone."""


def reference_vectors(model: str, texts: Sequence[str]) -> Vectors:
    """Compute the vectors of texts, each of length 1 and cut to the longest input: [texts, width]."""
    loaded = load_model(EngineConfig(model=model, offline=True, device="cpu", dtype="float32", attention="padded"))
    given = [ModelInput(TextInput(text, max_tokens=MODEL_MAX), DENSE_ONLY) for text in texts]
    payloads = prepared(loaded, given)
    places = sorted(range(len(payloads)), key=lambda place: payloads[place].tokens, reverse=True)
    vectors: dict[int, Vectors] = {}
    while places:
        count = max(1, _TOKENS // payloads[places[0]].tokens)
        batch, places = places[:count], places[count:]
        for place, row in zip(batch, loaded.forward([payloads[place] for place in batch]), strict=True):
            if not isinstance(row, Row):
                raise RuntimeError(f"the reference failed on text {place}: {row}")
            values = row.values[Output.DENSE]
            assert isinstance(values, np.ndarray)
            vectors[place] = values / np.linalg.norm(values)
    loaded.close()
    return np.stack([vectors[place] for place in range(len(texts))])
