"""Keyword arguments of the engine's methods as types, for methods that pass them on."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import TypedDict

from staged_pool.runtime.requests import Aggregation, Output
from staged_pool.stages.scheduling.entries import Priority


class CallOptions(TypedDict, total=False):
    """Arguments of all methods; see `EngineApi`."""

    max_tokens: int | None
    timeout_s: float
    priority: Priority | str
    tenant: Hashable
    cache_salt: str | None


class VectorOptions(CallOptions, total=False):
    """Arguments for dense vectors; see `EngineApi.embed`."""

    dimensions: int | None
    normalize: bool
    prompt_name: str | None
    prompt: str | None


class EmbedOptions(VectorOptions, total=False):
    """Arguments of `EngineApi.embed`."""

    outputs: Output | str | Iterable[Output | str]
    late_chunking: bool
    chunk_tokens: int | None
    offsets: bool
    max_active_dims: int | None


class ClassifyOptions(CallOptions, total=False):
    """Arguments of `EngineApi.classify`."""

    activate: bool
    candidate_labels: str | Sequence[str] | None
    hypothesis_template: str
    multi_label: bool


class TokenClassifyOptions(CallOptions, total=False):
    """Arguments of `EngineApi.classify_tokens`."""

    activate: bool
    aggregation: Aggregation


class ScoreOptions(CallOptions, total=False):
    """Arguments of `EngineApi.score`."""

    activate: bool
    instruction: str | None
