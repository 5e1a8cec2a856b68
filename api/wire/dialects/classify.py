"""vLLM's `/classify`, and our own `/classify_tokens`, which finds the entities of each text."""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np

from staged_pool.api.wire.body_fields import read_body
from staged_pool.api.wire.chunked_json import Pieces
from staged_pool.api.wire.dialects import infinity
from staged_pool.api.wire.dialects.zero_shot import label_settings
from staged_pool.api.wire.exchange import Body, Write, listing, with_request_id
from staged_pool.api.wire.field_errors import field_error
from staged_pool.api.wire.field_names import vllm_words
from staged_pool.api.wire.inputs import InputFields, text_inputs, text_or_pair_inputs
from staged_pool.runtime.card import ModelCard
from staged_pool.runtime.requests import MODEL_MAX, Aggregation, ClassifyRequest, TokenClassifyRequest
from staged_pool.runtime.results import ClassifyResult, TokenClassifyResult


class ClassifyBody(InputFields, kw_only=True):
    """Body of `/classify`; fields that are not named here are ignored."""

    use_activation: bool | None = None
    raw_scores: bool | None = None
    """Infinity's field, the opposite of `use_activation`; if it is sent, the answer has Infinity's form."""
    candidate_labels: str | list[str] | None = None
    """Labels to choose among, for a model of natural language inference (zero-shot classification).

    One text may have them with commas between. Each text with each label is one item. A label has at most 1024
    characters.
    """
    hypothesis_template: str | None = None
    """Statement that each label completes, with {} for the label. None: `This example is {}.`

    It has at most 1024 characters.
    """
    multi_label: bool | None = None
    """Score each label by itself. Otherwise the scores of a text add up to 1."""


class ClassifyTokensBody(InputFields, kw_only=True):
    """Body of `/classify_tokens`; fields that are not named here are ignored."""

    aggregation_strategy: Aggregation | None = None
    """None: `simple`."""


_CLASSIFY: Final = msgspec.json.Decoder(ClassifyBody)
_CLASSIFY_TOKENS: Final = msgspec.json.Decoder(ClassifyTokensBody)


def read_classify(body: Body, card: ModelCard) -> tuple[ClassifyRequest, Write]:
    """See `Read`."""
    fields = read_body(_CLASSIFY, body)
    activate = fields.use_activation is not False and not fields.raw_scores
    if fields.raw_scores is not None and fields.truncate_prompt_tokens is None:
        fields.truncate_prompt_tokens = MODEL_MAX  # Infinity truncates long texts
    inputs, places = text_or_pair_inputs(fields)
    request = ClassifyRequest(
        inputs=inputs,
        words=vllm_words(places),
        model=fields.model,
        cache_salt=fields.cache_salt,
        activate=activate,
        **label_settings(fields.candidate_labels, fields.hypothesis_template, fields.multi_label),
    )
    write = encode_classify if fields.raw_scores is None else infinity.encode_classify
    return request, with_request_id(write, fields.request_id)


def read_classify_tokens(body: Body, card: ModelCard) -> tuple[TokenClassifyRequest, Write]:
    """See `Read`."""
    fields = read_body(_CLASSIFY_TOKENS, body)
    inputs, places = text_inputs(fields)
    for index, given in enumerate(inputs):
        if not isinstance(given.source, str):
            what = "expected a text or a list of texts; entities are found only in texts"
            raise field_error(places("input", index), what, index)
    request = TokenClassifyRequest(
        inputs=inputs,
        words=vllm_words(places),
        model=fields.model,
        cache_salt=fields.cache_salt,
        aggregation=fields.aggregation_strategy or "simple",
    )
    return request, with_request_id(encode_classify_tokens, fields.request_id)


def encode_classify(result: ClassifyResult, /, *, request_id: str, created: int) -> Pieces:
    """Write the answer of `/classify`; see `Write`.

    `label` is null if the model's labels have no names. `labels` has the name of each of the `probs`.
    """
    best = result.best.tolist()
    data = [
        {
            "index": index,
            "label": result.labels[place] if place < len(result.labels) else None,
            "probs": row,
            "num_classes": len(row),
        }
        for index, (place, row) in enumerate(zip(best, np.ascontiguousarray(result.scores), strict=True))
    ]
    return listing(
        "classify",
        data,
        model=result.model,
        usage=result.usage,
        request_id=request_id,
        created=created,
        labels=result.labels,
    )


def encode_classify_tokens(result: TokenClassifyResult, /, *, request_id: str, created: int) -> Pieces:
    """Write the answer of `/classify_tokens`; see `Write`."""
    data = [{"index": index, "entities": entities} for index, entities in enumerate(result.entities)]
    return listing("classify", data, model=result.model, usage=result.usage, request_id=request_id, created=created)
