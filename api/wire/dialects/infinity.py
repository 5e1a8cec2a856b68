"""Infinity's answers of `/classify`, with labels by score, and of `/models`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from staged_pool.api.wire.chunked_json import Pieces, dump, dump_around
from staged_pool.api.wire.dialects.tei_predict import labels_by_score
from staged_pool.api.wire.exchange import usage_fields
from staged_pool.runtime.card import ModelCard
from staged_pool.runtime.requests import Output
from staged_pool.runtime.results import ClassifyResult
from staged_pool.runtime.statistics import EngineStatistics


def encode_classify(result: ClassifyResult, /, *, request_id: str, created: int) -> Pieces:
    """Write the labels of each input, the highest score first; see `Write`."""
    before = {"object": "classify", "id": f"classify-{request_id}", "model": result.model, "created": created}
    rows = labels_by_score(result)
    usage = {"usage": usage_fields(result.usage)}
    return dump_around(before, "data", rows, usage, item_values=4 * result.scores.shape[1])


def encode_models(models: Sequence[tuple[ModelCard, EngineStatistics]], *, created: int) -> bytes:
    """Write the list of the served models, with the load of each. `created` is in seconds since 1970."""
    data = [
        {
            "id": card.name,
            "object": "model",
            "created": created,
            "owned_by": "infinity",  # the only value that Infinity's client accepts
            "backend": "torch",
            "capabilities": _capabilities(card),
            "stats": _stats(statistics),
        }
        for card, statistics in models
    ]
    return dump({"object": "list", "data": data})


def _capabilities(card: ModelCard) -> list[str]:
    able = {
        "embed": Output.DENSE in card.outputs,
        "image_embed": Output.DENSE in card.outputs and "image" in card.lanes,
        "rerank": card.scoring is not None,
        "classify": Output.LABELS in card.outputs and card.scoring is None,
    }
    return [name for name, can in able.items() if can]


def _stats(statistics: EngineStatistics) -> Mapping[str, object]:
    waiting = sum(stage.waiting for stage in statistics.stages)
    return {
        "queue_fraction": statistics.admission.requests / statistics.admission.max_requests,
        "queue_absolute": waiting,
        "results_pending": statistics.admission.items,
    }
