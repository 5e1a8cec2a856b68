"""Task routes of text-embeddings-inference: texts are `inputs`, and answers are bare lists.

A text that is too long is truncated if `truncate` is true. Its default is the server's setting `auto_truncate`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
import numpy as np

from staged_pool.api.wire import json_decode
from staged_pool.api.wire.chunked_json import Pieces, average, dump, dump_list, entry_values
from staged_pool.api.wire.encodings import Encoding
from staged_pool.api.wire.exchange import Body, Write
from staged_pool.api.wire.field_names import InputPaths
from staged_pool.api.wire.fields import Dimensions
from staged_pool.api.wire.texts_or_ids import places_of_texts, texts_or_ids
from staged_pool.api.wire.truncation import Direction, side_of
from staged_pool.runtime.card import ModelCard
from staged_pool.runtime.requests import MODEL_MAX, EmbedRequest, Output, TextInput
from staged_pool.runtime.results import EmbedResult, ScoreResult
from staged_pool.runtime.tasks.embed import normalized
from staged_pool.runtime.tasks.score import rank
from staged_pool.stages.errors import NoInputs, Words


class TruncationFields(msgspec.Struct, kw_only=True):
    """Fields for texts that are too long, and for prompts."""

    truncate: bool | None = None
    truncation_direction: Direction | None = None
    prompt_name: str | None = None

    def text(self, source: str | tuple[int, ...], auto_truncate: bool) -> TextInput:
        cut = auto_truncate if self.truncate is None else self.truncate
        side = side_of(self.truncation_direction)
        return TextInput(source, max_tokens=MODEL_MAX if cut else None, truncate_side=side)


class EmbedBody(TruncationFields, kw_only=True):
    """Body of `/embed`, `/embed_all` and `/embed_sparse`; fields that are not named here are ignored."""

    inputs: msgspec.Raw
    """`str | list[str] | list[int] | list[list[int]]`."""
    normalize: bool | None = None
    dimensions: Dimensions | None = None
    max_active_dims: Dimensions | None = None
    """For `/embed_sparse`: number of the largest weights to keep of each vector."""


class Comparison(msgspec.Struct):
    """A text, and the texts that `/similarity` compares it with."""

    source_sentence: str
    sentences: list[str]


class SimilarityBody(msgspec.Struct):
    """Body of `/similarity`; fields that are not named here are ignored."""

    inputs: Comparison
    parameters: TruncationFields | None = None


_EMBED: Final = msgspec.json.Decoder(EmbedBody)
_SIMILARITY: Final = msgspec.json.Decoder(SimilarityBody)
_NONE: Final = "`{}` cannot be empty"


def read_embed(body: Body, card: ModelCard, *, output: Output, auto_truncate: bool) -> tuple[EmbedRequest, Write]:
    """See `Read`.

    Args:
        body: See `Read`.
        card: See `Read`.
        output: Kind of vectors of the route.
        auto_truncate: Truncate long texts if the request does not say.
    """
    fields = json_decode.decode(_EMBED, body)
    sources = texts_or_ids(fields.inputs, "inputs", none=_NONE.format("inputs"))
    request = EmbedRequest(
        inputs=tuple(fields.text(source, auto_truncate) for source in sources),
        words=_words(places_of_texts(fields.inputs, "inputs")),
        outputs=frozenset({output}),
        dimensions=fields.dimensions,
        normalize=fields.normalize is not False,
        prompt_name=fields.prompt_name,
        max_active_dims=fields.max_active_dims,
    )
    return request, _ENCODERS[output]


def _words(places: InputPaths) -> Words:
    return Words({"input": places.field, "max_tokens": "truncate"}, places)


def empty(field: str) -> NoInputs:
    """Return the error of a field without inputs."""
    return NoInputs(_NONE.format(field), param=field)


def encode_embed(result: EmbedResult, /, *, request_id: str, created: int) -> Pieces:
    """Write the vectors; see `Write`."""
    vectors = np.ascontiguousarray(result.embeddings)
    return dump_list(vectors, item_values=vectors.shape[1])


def encode_embed_all(result: EmbedResult, /, *, request_id: str, created: int) -> Pieces:
    """Write the token vectors of each input; see `Write`."""
    matrices = result.multi_vector or ()
    values = average(sum(matrix.size for matrix in matrices), len(matrices))
    return dump_list(map(Encoding().value, matrices), item_values=values)


def encode_embed_sparse(result: EmbedResult, /, *, request_id: str, created: int) -> Pieces:
    """Write the nonzero entries of each vector; see `Write`."""
    vectors = result.sparse or ()
    rows = (
        [{"index": index, "value": value} for index, value in zip(vector.indices.tolist(), vector.values, strict=True)]
        for vector in vectors
    )
    entries = sum(len(vector.indices) for vector in vectors)
    return dump_list(rows, item_values=average(4 * entries, len(vectors)))


_ENCODERS: Final[Mapping[Output, Write]] = {
    Output.DENSE: encode_embed,
    Output.MULTI_VECTOR: encode_embed_all,
    Output.SPARSE: encode_embed_sparse,
}


def encode_rerank(result: ScoreResult, /, texts: Sequence[str] | None, *, request_id: str, created: int) -> Pieces:
    """Write the texts, the best first; see `Write`.

    Args:
        result: Scores of the texts.
        texts: The texts to echo; None: echo none.
        request_id: See `Write`.
        created: See `Write`.
    """
    entries = (
        {
            "index": ranked.index,
            **({} if texts is None else {"text": texts[ranked.index]}),
            "score": np.float32(ranked.score),
        }
        for ranked in rank(result, None).ranking
    )
    return dump_list(entries, item_values=entry_values(texts or ()))


def read_similarity(body: Body, card: ModelCard, *, auto_truncate: bool) -> tuple[EmbedRequest, Write]:
    """See `Read` and `read_embed`."""
    fields = json_decode.decode(_SIMILARITY, body)
    if not fields.inputs.sentences:
        raise empty("sentences")
    parameters = fields.parameters or TruncationFields()
    sentences = (fields.inputs.source_sentence, *fields.inputs.sentences)
    names = {"input": "inputs", "max_tokens": "parameters.truncate", "prompt_name": "parameters.prompt_name"}
    request = EmbedRequest(
        inputs=tuple(parameters.text(sentence, auto_truncate) for sentence in sentences),
        words=Words(names, _sentence_place),
        prompt_name=parameters.prompt_name,
    )
    return request, encode_similarity


def _sentence_place(field: str, index: int) -> str:
    return f"inputs.sentences[{index - 1}]" if index else "inputs.source_sentence"


def encode_similarity(result: EmbedResult, /, *, request_id: str, created: int) -> Pieces:
    """Write the cosine similarities of the first vector with each of the others; see `Write`."""
    vectors = normalized(result.embeddings)
    return dump(vectors[1:] @ vectors[0])
