"""Results of the clients that have no equal among the engine's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from staged_pool.runtime.results import Entity, Usage


@dataclass(frozen=True, slots=True)
class EntitiesResult:
    """Entities in each text, in the order of the texts."""

    entities: tuple[tuple[Entity, ...], ...]
    usage: Usage
    model: str


@dataclass(frozen=True, slots=True)
class TokensResult:
    """Tokens of one text."""

    ids: tuple[int, ...]
    strings: tuple[str, ...]
    """The token of each id, in the tokenizer's notation."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Model that a server serves."""

    name: str
    max_tokens: int | None
    """Maximum tokens of an input, special tokens included."""
    card: Mapping[str, Any] = field(default_factory=dict)
    """The server's description of the model, with the fields of `ModelCard`."""


@dataclass(frozen=True, slots=True)
class Readiness:
    """Readiness of a server; true if it accepts requests."""

    ready: bool
    reason: str = ""
    """Reason if the server is not ready."""

    def __bool__(self) -> bool:
        return self.ready
