"""Types of the answers of tasks, for `/openapi.json`.

They do not encode answers. Tests decode real answers with them, and reject unknown fields.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec

from staged_pool.runtime.results import Entity


class AnswerSchema(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Base of answers; an unknown field is an error."""


class ErrorDetail(AnswerSchema):
    """Error of a request."""

    message: str
    """For a person: the problem, and what would be right."""
    type: str
    param: str | None
    """The field or header that is wrong; null if it is neither."""
    code: int
    """The HTTP status."""
    index: int | msgspec.UnsetType = msgspec.UNSET
    """Index of the input that is wrong, if it is one input."""


class Error(AnswerSchema):
    """Answer to a request that failed."""

    error: ErrorDetail
    message: str | msgspec.UnsetType = msgspec.UNSET
    """The same message, in Cohere's routes."""
    detail: str | msgspec.UnsetType = msgspec.UNSET
    """Only for a route or a method that does not exist."""


class SharedError(AnswerSchema):
    """Answer to a request that failed, on a path that several dialects share."""

    error: ErrorDetail
    message: str
    """The same message, for clients of Cohere."""
    detail: str
    """The same message, for clients of Voyage."""


class PlainError(AnswerSchema):
    """Answer to a request of Ollama's or Weaviate's clients that failed."""

    error: str


class NimError(AnswerSchema):
    """Answer to a request of NIM's clients that failed."""

    object: Literal["error"]
    message: str
    detail: str
    type: str


class Usage(AnswerSchema):
    """Token counts of the request."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    """Always 0: pooling models complete no tokens."""
    prompt_tokens_details: None
    completion_tokens_details: None


class Listing(AnswerSchema):
    id: str
    """Ends with the request's id."""
    object: Literal["list"]
    created: int
    """Seconds since 1970."""
    model: str
    usage: Usage


class Embedding(AnswerSchema):
    """Vector of one input."""

    index: int
    object: Literal["embedding", "embedding_dict"]
    embedding: list[float] | str | dict[str, list[float] | str]
    """Numbers, or base64 as a string. For several types, an object with an entry for each."""
    scale: float | msgspec.UnsetType = msgspec.UNSET
    """Factor that restores the values of int8 and uint8."""


class Embeddings(Listing):
    """Vectors of the inputs, in their order."""

    data: list[Embedding]
    normalized: bool | msgspec.UnsetType = msgspec.UNSET
    """This and the next two fields: only if the request has a field of Mixedbread's."""
    encoding_format: str | list[str] | msgspec.UnsetType = msgspec.UNSET
    dimensions: int | msgspec.UnsetType | None = msgspec.UNSET


_NUMBERS: Final = {"type": "array", "items": {"type": "number"}}
_ONE_OUTPUT: Final = [
    {"type": "string"},
    _NUMBERS,
    {"type": "array", "items": _NUMBERS},
    {
        "type": "object",
        "properties": {
            "indices": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]},
            "values": {"anyOf": [{"type": "string"}, _NUMBERS]},
        },
        "required": ["indices", "values"],
        "additionalProperties": False,
    },
]
_OUTPUTS: Final = {"type": "object", "additionalProperties": {"anyOf": _ONE_OUTPUT}}


class Pooled(AnswerSchema):
    """Output of the model for one input."""

    index: int
    object: Literal["pooling"]
    data: Annotated[Any, msgspec.Meta(extra_json_schema={"anyOf": [*_ONE_OUTPUT, _OUTPUTS]})]
    """Numbers, a list of numbers for each token, or the entries of a sparse vector.

    A sparse vector has its nonzero entries by ascending token id.

    For a list of tasks, an object with an entry for each. A string is base64.
    """
    scale: float | list[float] | dict[str, float | list[float]] | msgspec.UnsetType = msgspec.UNSET
    """Factor that restores the values of int8 and uint8; a list has one for each token.

    For a list of tasks, an object with an entry for each.
    """


class Pooling(Listing):
    """Outputs of the model for the inputs, in their order."""

    data: list[Pooled]


class Score(AnswerSchema):
    """Score of one document for its query."""

    index: int
    object: Literal["score"]
    score: float
    logit: float | msgspec.UnsetType = msgspec.UNSET
    """Logit of the score, if the request has `return_logits`."""


class Scores(Listing):
    """Scores of the documents, in their order."""

    data: list[Score]


class RankedText(AnswerSchema):
    """Text of a document."""

    text: str
    multi_modal: None


class RankedDocument(AnswerSchema):
    """One document of a ranking."""

    index: int
    """Index of the document in the request."""
    relevance_score: float
    document: RankedText | str | msgspec.UnsetType = msgspec.UNSET
    """A string if the request has `raw_scores`, as Infinity's clients send it."""


class VoyageRanked(AnswerSchema):
    """One document of a ranking, for clients of Voyage."""

    index: int
    relevance_score: float
    document: str | msgspec.UnsetType | None = msgspec.UNSET


class RankingUsage(AnswerSchema):
    """Token counts of the request."""

    prompt_tokens: int
    total_tokens: int


class ApiVersion(AnswerSchema):
    """Version of Cohere's API."""

    version: Literal["1", "2"]


class SearchUnits(AnswerSchema):
    """Cohere's billing units of a ranking."""

    search_units: int


class RankingMeta(AnswerSchema):
    """Metadata of a ranking, for clients of Cohere."""

    api_version: ApiVersion
    billed_units: SearchUnits


class Ranking(AnswerSchema):
    """Documents, the best first."""

    id: str
    object: Literal["list", "rerank"]
    created: int
    model: str
    usage: RankingUsage
    results: list[RankedDocument]
    meta: RankingMeta
    data: list[VoyageRanked] | msgspec.UnsetType = msgspec.UNSET
    """The same ranking, if the request has a field of Voyage's."""


class TeiRanked(AnswerSchema):
    """One text of a ranking."""

    index: int
    score: float
    text: str | msgspec.UnsetType = msgspec.UNSET


class TokensBilled(AnswerSchema):
    """Cohere's billing units of embeddings."""

    input_tokens: int | msgspec.UnsetType = msgspec.UNSET
    image_tokens: int | msgspec.UnsetType = msgspec.UNSET


class CohereMeta(AnswerSchema):
    """Metadata of embeddings, for clients of Cohere."""

    api_version: ApiVersion
    billed_units: TokensBilled


class CohereEmbeddings(AnswerSchema):
    """Vectors of the inputs, in their order."""

    id: str
    embeddings: Annotated[
        Any,
        msgspec.Meta(
            extra_json_schema={
                "anyOf": [
                    {"type": "array", "items": _NUMBERS},
                    {
                        "type": "object",
                        "additionalProperties": {
                            "type": "array",
                            "items": {"anyOf": [{"type": "string"}, _NUMBERS]},
                        },
                    },
                ]
            }
        ),
    ]
    """Lists of vectors by the names of the types; in version 1 one list, if the request names no type."""
    meta: CohereMeta
    response_type: Literal["embeddings_floats", "embeddings_by_type"]
    texts: list[str] | msgspec.UnsetType = msgspec.UNSET


class Classification(AnswerSchema):
    """Scores of the labels of one input."""

    index: int
    label: str | None
    """The label with the highest score; null if the labels have no names."""
    probs: list[float]
    """Scores of all labels."""
    num_classes: int


class Classifications(Listing):
    """Scores of the labels of the inputs, in their order."""

    data: list[Classification]
    labels: list[str]
    """Name of the label of each of the `probs`."""


class LabelScore(AnswerSchema):
    """One label."""

    label: str
    score: float


class InfinityClassifications(AnswerSchema):
    """Labels of each input, the highest score first; the answer to a request with `raw_scores`."""

    object: Literal["classify"]
    id: str
    model: str
    created: int
    data: list[list[LabelScore]]
    usage: Usage


class Entities(AnswerSchema):
    """Entities in one text."""

    index: int
    entities: list[Entity]


class TextEntities(Listing):
    """Entities in each text, in the order of the texts."""

    data: list[Entities]


class TeiSparseValue(AnswerSchema):
    """One nonzero entry of a vector over the vocabulary."""

    index: int
    """The token id."""
    value: float


class TeiError(AnswerSchema):
    """Answer to a request of text-embeddings-inference's clients that failed."""

    error: str
    error_type: Literal["Unhealthy", "Backend", "Overloaded", "Validation", "Tokenizer", "Empty"]
