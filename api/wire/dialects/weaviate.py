"""Routes of Weaviate's inference containers.

- text2vec-transformers: `/vectors` and `/meta`.
- reranker-transformers: `/rerank`.
- multi2vec-clip: `/vectorize`.

The requests are those of Weaviate's Go clients. They send no API key, and most of them no Content-Type.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Final, Literal

import msgspec
import numpy as np

from staged_pool.api.wire.body_fields import read_body
from staged_pool.api.wire.chunked_json import Pieces, dump, dump_around, dump_list, entry_values, joined
from staged_pool.api.wire.exchange import Body, Write
from staged_pool.api.wire.field_names import InputPaths
from staged_pool.api.wire.fields import Limit
from staged_pool.api.wire.images import plain, read_image
from staged_pool.api.wire.input_types import prompt_for
from staged_pool.runtime.card import ModelCard
from staged_pool.runtime.requests import MODEL_MAX, Content, EmbedRequest, Image, TextInput
from staged_pool.runtime.results import EmbedResult, ScoreResult
from staged_pool.stages.errors import NoInputs, Words


class VectorConfig(msgspec.Struct):
    """Settings of one vector."""

    pooling_strategy: str | None = None
    """Ignored: the model's folder defines the pooling."""
    task_type: Literal["query", "passage", ""] | None = None
    """Use of the text, which selects a prompt; ignored by a model without prompts."""
    dimensions: Limit | None = None


class VectorBody(msgspec.Struct):
    """Body of `/vectors`; fields that are not named here are ignored."""

    text: str
    config: VectorConfig | None = None


class VectorizeBody(msgspec.Struct):
    """Body of `/vectorize`."""

    texts: list[str] | None = None
    images: list[str] | None = None
    """Images in base64."""


_PROPERTY: Final = re.compile(rb'"property"\s*:')
_VECTOR: Final = msgspec.json.Decoder(VectorBody)
_VECTORIZE: Final = msgspec.json.Decoder(VectorizeBody)


def read_vector(body: Body, card: ModelCard) -> tuple[EmbedRequest, Write]:
    """See `Read`. The vector equals that of sentence-transformers' `encode`; a long text is truncated."""
    fields = read_body(_VECTOR, body)
    config = fields.config or VectorConfig()
    request = EmbedRequest(
        inputs=(TextInput(fields.text, max_tokens=MODEL_MAX),),
        name="text",
        words=Words({"input": "text", "dimensions": "config.dimensions"}, InputPaths("text", several=False)),
        dimensions=config.dimensions or None,
        normalize=card.normalize,
        prompt_name=prompt_for(config.task_type or None, card),
    )
    return request, partial(encode_vector, text=fields.text)


def encode_vector(result: EmbedResult, /, text: str, *, request_id: str, created: int) -> Pieces:
    """Write the vector; see `Write`. The container writes `dim`, but the Go client reads `dims`: both are written."""
    [vector] = result.embeddings
    return dump({"text": text, "vector": vector, "dim": len(vector), "dims": len(vector)})


def read_vectors(body: Body, card: ModelCard) -> tuple[EmbedRequest, Write]:
    """See `Read`."""
    fields = read_body(_VECTORIZE, body)
    texts, images = fields.texts or [], fields.images or []
    if not texts and not images:
        raise NoInputs("`texts` and `images` are empty; give at least one of either", param="texts")
    inputs: list[TextInput | Image] = [TextInput(text, max_tokens=MODEL_MAX) for text in texts]
    inputs += (read_image(given, f"images[{index}]", index, bare=True) for index, given in enumerate(images))
    words = Words({"input": "texts"}, TextImagePaths(len(texts)))
    request = EmbedRequest(inputs=tuple(inputs), words=words, normalize=card.normalize)
    return request, partial(encode_vectors, texts=len(texts))


@dataclass(frozen=True, slots=True)
class TextImagePaths:
    """Paths of inputs; the first `texts` inputs are texts, and the others are images."""

    texts: int

    def __call__(self, field: str, index: int) -> str:
        return f"texts[{index}]" if index < self.texts else f"images[{index - self.texts}]"


def encode_vectors(result: EmbedResult, /, texts: int, *, request_id: str, created: int) -> Pieces:
    """Write the vectors of the texts and of the images; see `Write`.

    Args:
        result: Vectors of the texts, then of the images.
        texts: Number of texts.
        request_id: See `Write`.
        created: See `Write`.
    """
    vectors = np.ascontiguousarray(result.embeddings)
    of_texts, of_images = (dump_list(rows, item_values=vectors.shape[1]) for rows in (vectors[:texts], vectors[texts:]))
    return joined((b'{"textVectors":', of_texts, b',"imageVectors":', of_images, b"}"))


def encode_scores(
    result: ScoreResult,
    /,
    query: Content,
    documents: Sequence[Content],
    single: bool,
    *,
    sigmoid: bool,
    request_id: str,
    created: int,
) -> Pieces:
    """Write the scores in the order of the documents; see `Write`.

    Args:
        result: Scores of the documents.
        query: The query to echo.
        documents: The documents to echo, each with its score.
        single: The only document was in `property`; write its score as `score`.
        sigmoid: Scores are the sigmoids of the logits, if the result has logits.
        request_id: See `Write`.
        created: See `Write`.
    """
    texts = [plain(document) or "" for document in documents]
    distinct = _distinct_scores(result, sigmoid=sigmoid)
    if single:
        return dump({"query": plain(query), "scores": None, "property": texts[0], "score": distinct[0]})
    scores = ({"document": text, "score": score} for text, score in zip(texts, distinct, strict=True))
    after = {"property": None, "score": None}
    return dump_around({"query": plain(query)}, "scores", scores, after, item_values=entry_values(texts))


def _distinct_scores(result: ScoreResult, *, sigmoid: bool) -> Sequence[np.float32 | float]:
    """Make the scores of different logits distinct, for a client that sorts by scores.

    Weaviate sends 32 documents a request, and reads scores as doubles. Sigmoids that are 1 in float32 are computed as
    doubles, which distinguish logits up to 36, even across requests. Scores of one request that are still equal, with
    different logits, are separated by the smallest step of a double.
    """
    scores: list[np.float32 | float] = [*result.scores]
    if result.logits is None:
        return scores
    logits = result.logits.astype(np.float64)
    if sigmoid:
        for place in np.flatnonzero(result.scores == 1.0).tolist():
            scores[place] = 1 / (1 + math.exp(-logits[place]))
    order = np.argsort(-logits, kind="stable").tolist()
    for better, worse in pairwise(order):
        if logits[worse] == logits[better]:
            scores[worse] = scores[better]
        elif scores[worse] >= scores[better]:
            scores[worse] = math.nextafter(scores[better], -math.inf)
    return scores


def encode_meta(card: ModelCard) -> bytes:
    """Write the description of the model that Weaviate shows."""
    model = {
        "model_name": card.name,
        "model_type": None,
        "architectures": [card.architecture],
        "hidden_size": card.width,
        "max_position_embeddings": card.max_tokens,
        "torch_dtype": card.dtype,
    }
    return dump({"model": model, "model_path": card.name})


def is_scores(body: Body) -> bool:
    """Return True for a body of reranker-transformers, on a path that several dialects share."""
    return _PROPERTY.search(body) is not None
