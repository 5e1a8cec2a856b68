"""Calls of `predict` and `rank`: their requests, and their results as CrossEncoder of sentence-transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict

import numpy as np
from numpy.typing import NDArray

from staged_pool.runtime.argument_types import of_type
from staged_pool.runtime.card import ModelCard
from staged_pool.runtime.encoding.inputs import listed_documents, listed_pairs
from staged_pool.runtime.encoding.options import PredictOptions, options
from staged_pool.runtime.encoding.tensors import no_rows, tensor
from staged_pool.runtime.requests import MODEL_MAX, Output
from staged_pool.runtime.results import ClassifyResult, ScoreResult
from staged_pool.runtime.tasks.classify import activated
from staged_pool.stages.errors import InvalidArgument, Unsupported


class RankedDocument(TypedDict):
    """One document of `rank`."""

    corpus_id: int
    """Its index in the call."""
    score: float
    text: NotRequired[str]


@dataclass(frozen=True, slots=True)
class Prediction:
    """One call of `predict`."""

    pairs: Sequence[tuple[str, str]]
    by_label: bool
    """Ask `EngineApi.classify`, because there are several labels; otherwise `EngineApi.score`."""
    arguments: Mapping[str, Any]
    """Arguments of that method, beside the pairs. A `timeout_s` is that of the whole call."""
    _options: PredictOptions
    _is_single: bool

    @property
    def shows_progress(self) -> bool:
        return bool(self._options.show_progress_bar)

    def finish(self, parts: Sequence[ScoreResult | ClassifyResult]) -> Any:
        """Return the scores of all requests, in the order of the pairs: [pairs], or [pairs, labels]."""
        shaped = self._shaped(parts)
        return shaped[0] if self._is_single else shaped

    def _shaped(self, parts: Sequence[ScoreResult | ClassifyResult]) -> Any:
        chosen = self._options
        to_array = not chosen.convert_to_tensor and chosen.convert_to_numpy is not False
        if not parts:
            return np.array([]) if to_array else no_rows() if chosen.convert_to_tensor else []
        scores: NDArray[Any] = np.concatenate([part.scores for part in parts])
        if chosen.activation_fn is not None:
            scores = np.asarray(chosen.activation_fn(tensor(scores)))
        if chosen.apply_softmax and self.by_label:
            scores = activated(scores, "softmax")
        return scores if to_array else tensor(scores) if chosen.convert_to_tensor else list(tensor(scores))


def prediction(card: ModelCard, inputs: object, in_order: Sequence[Any], keywords: Mapping[str, Any]) -> Prediction:
    """Plan a call of `predict`.

    Scores of one label have the model's activation, unless `activation_fn` is another one. Several labels have logits.

    Raises:
        InvalidArgument: An argument is wrong.
        Unsupported: The model is no cross-encoder.
    """
    chosen = options(PredictOptions, in_order, keywords)
    chosen.check_device(card.device)
    pairs, is_single = listed_pairs(inputs)
    by_label = len(card.labels) > 1 and Output.LABELS in card.outputs
    if not by_label and card.scoring != "cross-encoder":
        raise Unsupported(f"The model `{card.name}` is no cross-encoder, which predict and rank need: see score.")
    arguments: dict[str, Any] = {"max_tokens": MODEL_MAX, **chosen.engine}
    arguments["activate"] = chosen.activation_fn is None and not by_label
    if (prompt := _prompt(card, chosen)) is not None:
        if by_label:
            raise InvalidArgument(f"The model `{card.name}` takes no prompt.", param="prompt")
        arguments["instruction"] = prompt
    return Prediction(pairs, by_label, arguments, chosen, is_single)


def ranking(card: ModelCard, query: str, documents: Sequence[str], keywords: Mapping[str, Any]) -> Prediction:
    """Plan a call of `rank`, whose scores `ranked` sorts.

    Raises:
        InvalidArgument: An argument is wrong, or the model has several labels.
        Unsupported: The model is no cross-encoder.
    """
    if len(card.labels) > 1:
        raise InvalidArgument(f"rank needs a model of one label, and `{card.name}` has several: see predict.")
    if not isinstance(query, str):
        raise InvalidArgument(f"query must be a text, not {of_type(query)}", param="query")
    return prediction(card, [(query, document) for document in listed_documents(documents)], (), keywords)


def ranked(
    scores: NDArray[Any], pairs: Sequence[tuple[str, str]], top_k: int | None, *, return_documents: bool
) -> list[RankedDocument]:
    """Sort the documents of pairs by their scores, the best first; equal ones keep their order."""
    order = np.argsort(-scores, kind="stable")[:top_k].tolist()
    values = scores.tolist()
    found: list[RankedDocument] = [{"corpus_id": place, "score": values[place]} for place in order]
    for ranked_document in found if return_documents else ():
        ranked_document["text"] = pairs[ranked_document["corpus_id"]][1]
    return found


def _prompt(card: ModelCard, chosen: PredictOptions) -> str | None:
    if chosen.prompt is not None or chosen.prompt_name is None:
        return chosen.prompt
    if chosen.prompt_name not in card.prompts:
        known = ", ".join(map(repr, card.prompts)) or "none"
        message = f"prompt_name={chosen.prompt_name!r} is none of the model's prompts: {known}."
        raise InvalidArgument(message, param="prompt_name")
    return card.prompts[chosen.prompt_name]
