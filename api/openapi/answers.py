"""What answers look like: the types that `/openapi.json` describes them by. Nothing is written through them; tests
decode real answers as them, and unknown fields are refused there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec

from staged_pool.runtime.model import ModelCard
from staged_pool.runtime.results import Entity
from staged_pool.runtime.statistics import EngineStatistics


class _Answer(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    pass


class ErrorDetail(_Answer):
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


class Error(_Answer):
    """The answer to a request that failed."""

    error: ErrorDetail


class Usage(_Answer):
    """What the request cost."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    """0: nothing is completed here."""
    prompt_tokens_details: None
    completion_tokens_details: None


class _Listing(_Answer):
    id: str
    """Ends in the request's id."""
    object: Literal["list"]
    created: int
    """Seconds since 1970."""
    model: str
    usage: Usage


class Embedding(_Answer):
    """The vector of one input."""

    index: int
    object: Literal["embedding"]
    embedding: list[float] | str | dict[str, list[float] | str]
    """A string holds base64. Where several types are asked for, each stands under its name."""
    scale: float | msgspec.UnsetType = msgspec.UNSET
    """What int8 and uint8 are to be multiplied by."""


class Embeddings(_Listing):
    """A vector for each input, in their order."""

    data: list[Embedding]


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


class Pooled(_Answer):
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


class Score(_Answer):
    """How well one document answers its query."""

    index: int
    object: Literal["score"]
    score: float


class Scores(_Listing):
    """A score for each document, in their order."""

    data: list[Score]


class RankedText(_Answer):
    """The text of a document."""

    text: str
    multi_modal: None


class RankedDocument(_Answer):
    """One document of a ranking."""

    index: int
    """Its place in the request."""
    relevance_score: float
    document: RankedText | msgspec.UnsetType = msgspec.UNSET


class RankingUsage(_Answer):
    """What the request cost."""

    prompt_tokens: int
    total_tokens: int


class ApiVersion(_Answer):
    """Of Cohere's API."""

    version: Literal["1", "2"]


class SearchUnits(_Answer):
    """As Cohere counts."""

    search_units: int


class RankingMeta(_Answer):
    """What Cohere's clients expect."""

    api_version: ApiVersion
    billed_units: SearchUnits


class Ranking(_Answer):
    """The documents, the best first."""

    id: str
    object: Literal["list", "rerank"]
    created: int
    model: str
    usage: RankingUsage
    results: list[RankedDocument]
    meta: RankingMeta


class TeiRanked(_Answer):
    """One text of a ranking."""

    index: int
    score: float
    text: str | msgspec.UnsetType = msgspec.UNSET


class TokensBilled(_Answer):
    """As Cohere counts."""

    input_tokens: int | msgspec.UnsetType = msgspec.UNSET
    image_tokens: int | msgspec.UnsetType = msgspec.UNSET


class CohereMeta(_Answer):
    """What Cohere's clients expect."""

    api_version: ApiVersion
    billed_units: TokensBilled


class CohereEmbeddings(_Answer):
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


class Classification(_Answer):
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


class LabelScore(_Answer):
    """One label."""

    label: str
    score: float


class InfinityClassifications(_Answer):
    """The labels of each input, the likeliest first: the answer to a request that has `raw_scores`."""

    object: Literal["classify"]
    id: str
    model: str
    created: int
    data: list[list[LabelScore]]
    usage: Usage


class Entities(_Answer):
    """The entities in one text."""

    index: int
    entities: list[Entity]


class TextEntities(_Listing):
    """The entities in each text, in their order."""

    data: list[Entities]


class TokenIds(_Answer):
    """The tokens of one text or conversation."""

    count: int
    max_model_len: int
    """Tokens of the longest input that the model takes."""
    tokens: list[int]
    token_strs: list[str] | None


class TeiToken(_Answer):
    """One token."""

    id: int
    text: str
    special: bool
    start: int | None
    """In characters of the text; null where the token stands for nothing of it."""
    stop: int | None


class TeiSparseValue(_Answer):
    """One entry of a vector as wide as the vocabulary that is not 0."""

    index: int
    """The token's id."""
    value: float


class TeiError(_Answer):
    """The answer to a request that failed, as clients of text-embeddings-inference know it."""

    error: str
    error_type: Literal["unhealthy", "backend", "overloaded", "validation", "tokenizer", "empty"]


class TeiInfo(_Answer):
    """The model, and limits of requests to it."""

    model_id: str
    model_sha: str | None
    model_dtype: str
    model_type: dict[str, Any]
    max_concurrent_requests: int
    max_input_length: int
    max_batch_tokens: int
    max_batch_requests: int
    max_client_batch_size: int
    auto_truncate: bool
    tokenization_workers: int
    version: str
    sha: None
    docker_label: None


class Prompt(_Answer):
    """The text of tokens."""

    prompt: str


class ServedModel(_Answer):
    """One model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int
    permission: list[str]
    """Always empty: a key opens all models."""
    staged_pool: ModelCard
    """What was understood of it."""


class Models(_Answer):
    """The models that are served."""

    object: Literal["list"]
    data: list[ServedModel]


class InfinityStats(_Answer):
    """How busy a model is."""

    queue_fraction: float
    queue_absolute: int
    results_pending: int


class InfinityModel(_Answer):
    """One model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    backend: str
    capabilities: list[Literal["embed", "image_embed", "rerank", "classify"]]
    stats: InfinityStats


class InfinityModels(_Answer):
    """The models that are served, and how busy they are."""

    object: Literal["list"]
    data: list[InfinityModel]


class Version(_Answer):
    """Of this server."""

    version: str


class Load(_Answer):
    """How busy the server is."""

    server_load: int
    """Requests inside."""


class Ready(_Answer):
    """The server takes requests."""

    ready: Literal[True]
    models: list[ModelCard]


class NotReady(_Answer):
    """The server takes no requests."""

    ready: Literal[False]
    reason: str


class Stages(_Answer):
    """Every stage of every model at one moment."""

    models: Mapping[str, EngineStatistics]


Anything: TypeAlias = Any
