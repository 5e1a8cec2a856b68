"""What calls give that an engine gives in another form, or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from staged_pool.runtime.results import Entity, Usage


@dataclass(frozen=True, slots=True)
class EntitiesResult:
    """The entities in each text."""

    entities: tuple[tuple[Entity, ...], ...]
    usage: Usage
    model: str


@dataclass(frozen=True, slots=True)
class TokensResult:
    """One tokenized text."""

    ids: tuple[int, ...]
    strings: tuple[str, ...]
    """What each id stands for, in the tokenizer's own spelling."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model of the server."""

    name: str
    max_tokens: int | None
    """Longest input, special tokens included."""
    card: Mapping[str, Any] = field(default_factory=dict)
    """What the server understood of it, by the names of `ModelCard`."""


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether the server takes requests."""

    ready: bool
    reason: str = ""
    """Why not."""

    def __bool__(self) -> bool:
        return self.ready
