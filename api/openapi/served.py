"""What is said of the models and of the server, rather than of inputs: as `answers.py` for the answers of tasks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from staged_pool.api.openapi.answers import Answer
from staged_pool.runtime.model import ModelCard
from staged_pool.runtime.statistics import EngineStatistics


class TokenIds(Answer):
    """The tokens of one text or conversation."""

    count: int
    max_model_len: int
    """Tokens of the longest input that the model takes."""
    tokens: list[int]
    token_strs: list[str] | None


class TeiToken(Answer):
    """One token."""

    id: int
    text: str
    special: bool
    start: int | None
    """In characters of the text; null where the token stands for nothing of it."""
    stop: int | None


class TeiInfo(Answer):
    """The model, and limits of requests to it."""

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


class Prompt(Answer):
    """The text of tokens."""

    prompt: str


class ServedModel(Answer):
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


class Models(Answer):
    """The models that are served."""

    object: Literal["list"]
    data: list[ServedModel]


class InfinityStats(Answer):
    """How busy a model is."""

    queue_fraction: float
    queue_absolute: int
    results_pending: int


class InfinityModel(Answer):
    """One model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    backend: str
    capabilities: list[Literal["embed", "image_embed", "rerank", "classify"]]
    stats: InfinityStats


class InfinityModels(Answer):
    """The models that are served, and how busy they are."""

    object: Literal["list"]
    data: list[InfinityModel]


class Alive(Answer):
    """Of a server that answers."""

    unix: float
    """Its clock: seconds since 1970."""


class Version(Answer):
    """Of this server."""

    version: str


class Load(Answer):
    """How busy the server is."""

    server_load: int
    """Requests inside."""


class Ready(Answer):
    """The server takes requests."""

    ready: Annotated[bool, msgspec.Meta(extra_json_schema={"const": True})]
    models: list[ModelCard]


class NotReady(Answer):
    """The server takes no requests."""

    ready: Annotated[bool, msgspec.Meta(extra_json_schema={"const": False})]
    reason: str


class Stages(Answer):
    """Every stage of every model at one moment."""

    models: Mapping[str, EngineStatistics]


Anything: TypeAlias = Any
