"""What clients say that a text is for (`input_type`), and the prompt of a model that stands for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from staged_pool.runtime.model import ModelCard
from staged_pool.stages.errors import InvalidInput, shortened

INPUT_TYPES: Final[Mapping[str, str | None]] = {
    "query": "query",
    "document": "document",
    "passage": "document",
    "search_query": "query",
    "search_document": "document",
    "classification": None,
    "clustering": None,
    "image": None,
}
"""The names that clients of Voyage, NIM and Cohere send, and the role of each with models that tell roles apart."""


def prompt_for(input_type: str | None, card: ModelCard, *, strict: bool = False) -> str | None:
    """Name the prompt of a model that stands for an `input_type`; None for the default prompt.

    A model without prompts reads every text in the same way, so there the purpose changes nothing and is ignored.

    Args:
        input_type: One of the model's own prompts, or a name of `INPUT_TYPES`.
        card: Of the model.
        strict: Reject unknown names also where the model has no prompts, as Cohere does.

    Raises:
        InvalidInput: The name is unknown; says which are known.
    """
    if input_type is None or input_type in card.prompts:
        return input_type
    if not card.prompts and not strict:
        return None
    if input_type not in INPUT_TYPES:
        known = ", ".join(dict.fromkeys((*card.prompts, *INPUT_TYPES)))
        message = f"Unsupported input_type '{shortened(input_type)}'. Supported values: {known}"
        raise InvalidInput(message, param="input_type")
    return INPUT_TYPES[input_type] if card.prompts else None
