"""Each dialect's names for the engine's fields, so that errors name what the caller sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from staged_pool.stages.errors import Words

VLLM: Final[Mapping[str, str]] = {
    "aggregation": "aggregation_strategy",
    "max_document_tokens": "max_tokens_per_doc",
    "max_query_tokens": "max_tokens_per_query",
    "max_tokens": "truncate_prompt_tokens",
    "outputs": "task",
}
"""Fields with another name in OpenAI's and vLLM's routes, by the engine's name."""


@dataclass(frozen=True, slots=True)
class InputPaths:
    """Paths of the inputs in one field of a body."""

    field: str
    several: bool = True
    """True: the field is a list with an entry for each input. False: it is the only input."""
    endings: Sequence[str] = ()
    """The rest of each input's path, such as `.text`; empty: no input has one."""

    def __call__(self, field: str, index: int) -> str:
        path = f"{self.field}[{index}]" if self.several else self.field
        return path + self.endings[index] if self.endings else path


@dataclass(frozen=True, slots=True)
class QueryDocumentPaths:
    """Paths of queries and documents."""

    queries: InputPaths
    documents: InputPaths

    def __call__(self, field: str, index: int) -> str:
        side = self.queries if field == self.queries.field else self.documents
        return side(field, index)


def vllm_words(places: InputPaths, fields: Mapping[str, str] | None = None) -> Words:
    """Return the field names of a route of OpenAI or vLLM.

    Args:
        places: Paths of the inputs.
        fields: Additional names, by the engine's.
    """
    return Words({**VLLM, "input": places.field, **(fields or {})}, places)
