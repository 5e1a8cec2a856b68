"""Parts of a loaded model: its transformer of texts, and payloads for its forwards."""

from __future__ import annotations

from collections.abc import Sequence

from staged_pool.runtime.model import ModelInput
from staged_pool.runtime.models.encoder import Encoder
from staged_pool.runtime.models.towers.text import TextTower
from staged_pool.runtime.models.transformer.packed_transformer import PackedTransformer
from staged_pool.runtime.payloads import Payload
from staged_pool.stages.work import Prepared


def text_transformer(model: Encoder) -> PackedTransformer:
    """Return the transformer of a model that reads texts."""
    tower = model.towers["text"]
    assert isinstance(tower, TextTower)
    return tower.transformer


def prepared(model: Encoder, given: Sequence[ModelInput]) -> list[Payload]:
    """Preprocess inputs to the payloads of a forward.

    Raises:
        RuntimeError: An input is rejected.
    """
    payloads: list[Payload] = []
    for one in model.preprocess(given):
        if not isinstance(one, Prepared):
            raise RuntimeError(f"an input of the measurement was rejected: {one}")
        payloads.append(one.payload)
    return payloads
