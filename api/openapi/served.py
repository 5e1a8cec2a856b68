"""Types of the answers of routes that describe tokens, models and the server, for `/openapi.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from staged_pool.api.limits.http_statistics import HttpStatistics
from staged_pool.api.openapi.answers import AnswerSchema
from staged_pool.runtime.card import ModelCard
from staged_pool.runtime.pipelines.statistics import PipelineStatistics
from staged_pool.runtime.statistics import EngineStatistics


class TokenIds(AnswerSchema):
    """Tokens of one text or conversation."""

    count: int
    max_model_len: int
    """Maximum tokens of an input."""
    tokens: list[int]
    token_strs: list[str] | None


class TeiToken(AnswerSchema):
    """One token."""

    id: int
    text: str
    special: bool
    start: int | None
    """Offset in the text, in characters; null for a special token."""
    stop: int | None


class TeiInfo(AnswerSchema):
    """Description of the model, and the limits of its requests."""

    model_id: str
    model_sha: str | None
    model_dtype: str
    served_model_name: str
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


class Prompt(AnswerSchema):
    """Text of token ids."""

    prompt: str


class ServedModel(AnswerSchema):
    """One served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int
    permission: list[str]
    """Always empty: an API key gives access to all models."""
    staged_pool: ModelCard
    """Description of the model."""


class Models(AnswerSchema):
    """The served models."""

    object: Literal["list"]
    data: list[ServedModel]


class InfinityStats(AnswerSchema):
    """Load of a model."""

    queue_fraction: float
    queue_absolute: int
    results_pending: int


class InfinityModel(AnswerSchema):
    """One served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    backend: str
    capabilities: list[Literal["embed", "image_embed", "rerank", "classify"]]
    stats: InfinityStats


class InfinityModels(AnswerSchema):
    """The served models, with their load."""

    object: Literal["list"]
    data: list[InfinityModel]


class Alive(AnswerSchema):
    """Liveness of the server."""

    unix: float
    """The server's clock: seconds since 1970."""


class Version(AnswerSchema):
    """Version of the server, or of an API."""

    version: str


class LaneLoad(AnswerSchema):
    """Load of one lane of a model."""

    drain_s: float
    """Predicted seconds for everything in flight in it."""
    utilization: float
    """Mean part of the device's slots that was taken of late, 0 to 1."""


class Load(AnswerSchema):
    """Load of the server."""

    server_load: int
    """Number of requests in progress."""
    running: int
    """Requests with an input on a device."""
    queued: int
    """All other requests in progress."""
    requests_per_second: float
    """Answered requests a second, of the last seconds."""
    utilization: float
    """Utilization of the lane that is used most, 0 to 1."""
    fullness: float
    """Used part of the nearest limit of admission, 0 to 1."""
    lanes: dict[str, dict[str, LaneLoad]]
    """By model, and by lane."""


class Ready(AnswerSchema):
    """The server accepts requests."""

    ready: Annotated[bool, msgspec.Meta(extra_json_schema={"const": True})]
    models: list[ModelCard]


class LoadingModel(AnswerSchema):
    """The load that runs now."""

    model: str
    phase: Literal["download", "weights", "warm-up"]
    percent: int | None
    """Downloaded part; null in the other phases."""


class NotReady(AnswerSchema):
    """The server accepts no requests."""

    ready: Annotated[bool, msgspec.Meta(extra_json_schema={"const": False})]
    reason: str
    loading: LoadingModel | msgspec.UnsetType = msgspec.UNSET
    """Only while models load, and once a phase has begun."""


class Stages(AnswerSchema):
    """State of every stage of every model and pipeline, and of the HTTP side."""

    models: Mapping[str, EngineStatistics]
    pipelines: Mapping[str, PipelineStatistics]
    http: HttpStatistics | None
    """None: no front has reported yet."""


Anything: TypeAlias = Any
