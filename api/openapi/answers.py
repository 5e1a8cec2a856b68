"""What the answers of tasks look like: the types that `/openapi.json` describes them by. Nothing is written through
them; tests decode real answers as them, and unknown fields are refused there."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec

from staged_pool.runtime.results import Entity


class Answer(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Of which all fields are known."""


class ErrorDetail(Answer):
    """What went wrong with a request."""

    message: str
    """For a person: what is wrong, and what would be right."""
    type: str
    param: str | None
    """The field or header that is wrong, where it is one."""
    code: int
    """The status again."""
    index: int | msgspec.UnsetType = msgspec.UNSET
    """Which of the request's inputs it is about, where it is about one."""


class Error(Answer):
    """The answer to a request that failed."""

    error: ErrorDetail
    message: str | msgspec.UnsetType = msgspec.UNSET
    """The same once more, where clients of Cohere look for it."""
    detail: str | msgspec.UnsetType = msgspec.UNSET
    """Of a route or a method that there is not."""


class SharedError(Answer):
    """The answer to a request that failed, on a path that several dialects share."""

    error: ErrorDetail
    message: str
    """The same once more, where clients of Cohere look for it."""
    detail: str
    """The message again, for clients of Voyage."""


class PlainError(Answer):
    """The answer to a request that failed, as clients of Ollama and Weaviate know it."""

    error: str


class NimError(Answer):
    """The answer to a request that failed, as clients of NIM know it."""

    object: Literal["error"]
    message: str
    detail: str
    type: str


class Usage(Answer):
    """What the request cost."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    """0: nothing is completed here."""
    prompt_tokens_details: None
    completion_tokens_details: None


class _Listing(Answer):
    id: str
    """Ends in the request's id."""
    object: Literal["list"]
    created: int
    """Seconds since 1970."""
    model: str
    usage: Usage


class Embedding(Answer):
    """The vector of one input."""

    index: int
    object: Literal["embedding", "embedding_dict"]
    embedding: list[float] | str | dict[str, list[float] | str]
    """A string holds base64. Where several types are asked for, each stands under its name."""
    scale: float | msgspec.UnsetType = msgspec.UNSET
    """What int8 and uint8 are to be multiplied by."""


class Embeddings(_Listing):
    """A vector for each input, in their order."""

    data: list[Embedding]
    normalized: bool | msgspec.UnsetType = msgspec.UNSET
    """This and what follows: where the request has a field of Mixedbread's."""
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


class Pooled(Answer):
    """What the model gives for one input."""

    index: int
    object: Literal["pooling"]
    data: Annotated[Any, msgspec.Meta(extra_json_schema={"anyOf": [*_ONE_OUTPUT, _OUTPUTS]})]
    """Numbers, or lists of them for each token; the entries of a sparse vector that are not 0, by token id, ascending;
    for a list of tasks, each under its name. A string holds base64."""
    scale: float | list[float] | dict[str, float | list[float]] | msgspec.UnsetType = msgspec.UNSET
    """What int8 and uint8 are to be multiplied by: those of a token by its entry of a list; for a list of tasks, each
    under its name."""


class Pooling(_Listing):
    """What the model gives for each input, in their order."""

    data: list[Pooled]


class Score(Answer):
    """How well one document answers its query."""

    index: int
    object: Literal["score"]
    score: float
    logit: float | msgspec.UnsetType = msgspec.UNSET
    """What the score was made of, where `return_logits` asks for it."""


class Scores(_Listing):
    """A score for each document, in their order."""

    data: list[Score]


class RankedText(Answer):
    """The text of a document."""

    text: str
    multi_modal: None


class RankedDocument(Answer):
    """One document of a ranking."""

    index: int
    """Its place in the request."""
    relevance_score: float
    document: RankedText | str | msgspec.UnsetType = msgspec.UNSET
    """A text where the request has `raw_scores`, as clients of Infinity know it."""


class VoyageRanked(Answer):
    """One document of a ranking, as clients of Voyage know it."""

    index: int
    relevance_score: float
    document: str | msgspec.UnsetType | None = msgspec.UNSET


class RankingUsage(Answer):
    """What the request cost."""

    prompt_tokens: int
    total_tokens: int


class ApiVersion(Answer):
    """Of Cohere's API."""

    version: Literal["1", "2"]


class SearchUnits(Answer):
    """As Cohere counts."""

    search_units: int


class RankingMeta(Answer):
    """What Cohere's clients expect."""

    api_version: ApiVersion
    billed_units: SearchUnits


class Ranking(Answer):
    """The documents, the best first."""

    id: str
    object: Literal["list", "rerank"]
    created: int
    model: str
    usage: RankingUsage
    results: list[RankedDocument]
    meta: RankingMeta
    data: list[VoyageRanked] | msgspec.UnsetType = msgspec.UNSET
    """The ranking again, where the request has a field of Voyage's."""


class TeiRanked(Answer):
    """One text of a ranking."""

    index: int
    score: float
    text: str | msgspec.UnsetType = msgspec.UNSET


class TokensBilled(Answer):
    """As Cohere counts."""

    input_tokens: int | msgspec.UnsetType = msgspec.UNSET
    image_tokens: int | msgspec.UnsetType = msgspec.UNSET


class CohereMeta(Answer):
    """What Cohere's clients expect."""

    api_version: ApiVersion
    billed_units: TokensBilled


class CohereEmbeddings(Answer):
    """A vector for each input, in their order."""

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
    """By the name of their type; in version 1 without one, where none was asked for."""
    meta: CohereMeta
    response_type: Literal["embeddings_floats", "embeddings_by_type"]
    texts: list[str] | msgspec.UnsetType = msgspec.UNSET


class Classification(Answer):
    """The labels of one input."""

    index: int
    label: str | None
    """The one with the highest score; null where labels have no names."""
    probs: list[float]
    """Of all labels."""
    num_classes: int


class Classifications(_Listing):
    """The labels of each input, in their order."""

    data: list[Classification]
    labels: list[str]
    """What each of the `probs` is of."""


class LabelScore(Answer):
    """One label."""

    label: str
    score: float


class InfinityClassifications(Answer):
    """The labels of each input, the likeliest first: the answer to a request that has `raw_scores`."""

    object: Literal["classify"]
    id: str
    model: str
    created: int
    data: list[list[LabelScore]]
    usage: Usage


class Entities(Answer):
    """The entities in one text."""

    index: int
    entities: list[Entity]


class TextEntities(_Listing):
    """The entities in each text, in their order."""

    data: list[Entities]


class TeiSparseValue(Answer):
    """One entry of a vector as wide as the vocabulary that is not 0."""

    index: int
    """The token's id."""
    value: float


class TeiError(Answer):
    """The answer to a request that failed, as clients of text-embeddings-inference know it."""

    error: str
    error_type: Literal["Unhealthy", "Backend", "Overloaded", "Validation", "Tokenizer", "Empty"]
