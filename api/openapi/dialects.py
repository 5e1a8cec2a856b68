"""Answers and operations of the routes of Ollama, Voyage, NIM, Weaviate, Mixedbread and the hub."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, TypeAlias

import msgspec

from staged_pool.api.openapi.answers import AnswerSchema, Embeddings, Error, NimError, RankingUsage, Usage
from staged_pool.api.openapi.operation import BINARY, PLAIN_ERROR, SHARED_ERROR, Operation, get, post, task
from staged_pool.api.openapi.served import Version
from staged_pool.api.wire.dialects import mixedbread, nim, ollama, openai, voyage, weaviate

Document: TypeAlias = str | dict[str, Any]


class HubEntity(AnswerSchema):
    """An entity, in the form of the hub."""

    score: float
    word: str
    """The text of the entity."""
    start: int
    """Index of its first character."""
    end: int
    """Index behind its last character."""
    entity_group: str | msgspec.UnsetType = msgspec.UNSET
    """Its label."""
    entity: str | msgspec.UnsetType = msgspec.UNSET
    """Its label, with the aggregation strategy `none`."""


class OllamaEmbeddings(AnswerSchema):
    """Vectors of the texts, in their order."""

    model: str
    embeddings: list[list[float]]
    total_duration: int | msgspec.UnsetType = msgspec.UNSET
    """Time of the request in nanoseconds."""
    load_duration: int | msgspec.UnsetType = msgspec.UNSET
    """Always 0: models are loaded before the server takes requests."""
    prompt_eval_count: int | msgspec.UnsetType = msgspec.UNSET
    """Tokens of all texts."""


class OllamaEmbedding(AnswerSchema):
    """Vector of one text."""

    embedding: list[float]


class OllamaDetails(AnswerSchema):
    """Description of a model's weights."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(AnswerSchema):
    """One served model."""

    name: str
    """Name with its tag."""
    model: str
    size: int
    """Size of the weights in bytes."""
    digest: str
    details: OllamaDetails
    modified_at: str


class OllamaModels(AnswerSchema):
    """The served models."""

    models: list[OllamaModel]


class OllamaLoaded(AnswerSchema):
    """One loaded model."""

    name: str
    model: str
    size: int
    digest: str
    details: OllamaDetails
    expires_at: str
    size_vram: int
    context_length: int


class OllamaRunning(AnswerSchema):
    """The loaded models."""

    models: list[OllamaLoaded]


class OllamaShown(AnswerSchema):
    """Description of one model."""

    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, str | int]
    capabilities: list[str]
    modified_at: str


class VoyageUsage(AnswerSchema):
    """Token counts of the request."""

    text_tokens: int
    """All tokens, including those of images."""
    image_pixels: Literal[0]
    video_pixels: Literal[0]
    total_tokens: int


class VoyageEmbedding(AnswerSchema):
    """Vector of one input."""

    object: Literal["embedding"]
    embedding: list[float] | str
    index: int
    scale: float | msgspec.UnsetType = msgspec.UNSET
    """Factor that restores the values of int8 and uint8."""


class VoyageEmbeddings(AnswerSchema):
    """Vectors of the inputs, in their order."""

    object: Literal["list"]
    model: str
    data: list[VoyageEmbedding]
    usage: VoyageUsage


class NimRanked(AnswerSchema):
    """One passage of a ranking."""

    index: int
    logit: float


class NimRanking(AnswerSchema):
    """Passages, the best first."""

    model: str
    rankings: list[NimRanked]
    usage: RankingUsage


class Health(AnswerSchema):
    """State of the server."""

    object: Literal["health-response"]
    message: str


class MixedbreadRanked(AnswerSchema):
    """One document of a ranking."""

    index: int
    score: float
    object: Literal["rank_result"]
    input: Document | msgspec.UnsetType = msgspec.UNSET


class MixedbreadRanking(AnswerSchema):
    """Documents, the best first."""

    id: str
    object: Literal["list"]
    model: str
    data: list[MixedbreadRanked]
    usage: Usage
    top_k: int
    return_input: bool


class WeaviateVector(AnswerSchema):
    """Vector of one text."""

    text: str
    vector: list[float]
    dim: int
    dims: int


class WeaviateVectors(AnswerSchema):
    """Vectors of the texts and of the images."""

    textVectors: list[list[float]]
    imageVectors: list[list[float]]


class WeaviateScore(AnswerSchema):
    """Score of one document."""

    document: str
    score: float


class WeaviateScores(AnswerSchema):
    """Scores in the order of the documents; or the score of the text in `property`."""

    query: str | None
    scores: list[WeaviateScore] | None
    property: str | None
    score: float | None


class WeaviateMeta(AnswerSchema):
    """Description of the model, for Weaviate."""

    model: dict[str, Any]
    model_path: str


_TEXTS: Final = ["A man is eating food.", "A woman is playing the violin."]

_VECTOR: Final = task(
    "A vector, for Weaviate's text2vec-transformers",
    "Vectors",
    weaviate.VectorBody,
    WeaviateVector,
    errors=PLAIN_ERROR,
    examples={"query": {"text": _TEXTS[0], "config": {"pooling_strategy": "masked_mean", "task_type": "query"}}},
)

TASK_OPERATIONS: Final[Mapping[str, Mapping[str, Operation]]] = {
    "/embeddings_image": task(
        "Embed images, for older clients of Infinity",
        "Vectors",
        openai.EmbeddingsBody,
        Embeddings,
        "The same as /embeddings with the `modality` image.",
        content_types=BINARY,
        forms=True,
    ),
    "/v1/multimodalembeddings": task(
        "Embed texts and images, for clients of Voyage",
        "Vectors",
        voyage.MultimodalBody,
        VoyageEmbeddings,
        errors=SHARED_ERROR,
        examples={"texts": {"inputs": [{"content": [{"type": "text", "text": text}]} for text in _TEXTS]}},
    ),
    "/api/embed": task(
        "Embed texts, for clients of Ollama",
        "Vectors",
        ollama.OllamaEmbedBody,
        OllamaEmbeddings,
        "A model's name may have the tag `latest`. The body is read as JSON, whatever its content type.",
        errors=PLAIN_ERROR,
        examples={"texts": {"input": _TEXTS, "truncate": True}, "none": {"input": []}},
    ),
    "/api/embeddings": task(
        "Embed one text, for older clients of Ollama",
        "Vectors",
        ollama.OllamaEmbeddingsBody,
        OllamaEmbedding,
        errors=PLAIN_ERROR,
        examples={"text": {"prompt": _TEXTS[0]}},
    ),
    "/vectors": _VECTOR,
    "/vectors/": _VECTOR,
    "/vectorize": task(
        "Vectors of texts and images, for Weaviate's multi2vec-clip",
        "Vectors",
        weaviate.VectorizeBody,
        WeaviateVectors,
        errors=PLAIN_ERROR,
        examples={"texts": {"texts": _TEXTS}},
    ),
    "/v1/ranking": task(
        "Rank passages, for clients of NIM",
        "Scores",
        nim.RankingBody,
        NimRanking,
        errors=(NimError,),
        examples={"the best": {"query": {"text": "Who eats?"}, "passages": [{"text": text} for text in _TEXTS]}},
    ),
    "/v1/reranking": task(
        "Rank documents, for clients of Mixedbread",
        "Scores",
        mixedbread.MixedbreadRerankBody,
        MixedbreadRanking,
        examples={"the best": {"query": "Who eats?", "input": _TEXTS, "top_k": 1, "return_input": True}},
    ),
}
"""Routes of tasks."""

LISTINGS: Final[Mapping[str, Mapping[str, Operation]]] = {
    "/api/tags": get("List the served models, for clients of Ollama", "Models", OllamaModels, errors=PLAIN_ERROR),
    "/api/ps": get("List the loaded models, for clients of Ollama", "Models", OllamaRunning, errors=PLAIN_ERROR),
    "/api/show": post("One model, for clients of Ollama", "Models", ollama.ShowBody, OllamaShown, errors=PLAIN_ERROR),
    "/api/version": get("Release of Ollama whose API this is", "Models", Version, errors=PLAIN_ERROR),
    "/meta": get("The model, for Weaviate", "Models", WeaviateMeta, errors=PLAIN_ERROR),
    "/.well-known/live": get("The same as /health, for Weaviate", status=204),
    "/.well-known/ready": get("The same as /ready, for Weaviate", status=204, unready=Health),
    "/v1/health/live": get("The same as /health, for clients of NIM", answer=Health),
    "/v1/health/ready": get("The same as /ready, for clients of NIM", answer=Health, unready=Health),
    "/embeddings_audio": {
        "POST": Operation(summary="Rejected: no model here reads audio", tag="Vectors", status=501, answer=(Error,)),
    },
}
"""Routes that describe the served models and the server."""
