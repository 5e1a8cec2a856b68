"""What every request of vLLM's contract may carry, whatever it asks for."""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias

import msgspec

from staged_pool.api.wire.images import ImageFields
from staged_pool.runtime.requests import MAX_SALT_CHARACTERS

ModelName: TypeAlias = Annotated[str, msgspec.Meta(max_length=1024)]
MaxTokens: TypeAlias = Annotated[int, msgspec.Meta(ge=-1)]
Limit: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
Dimensions: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]

NOT_SPECIFIED: Final = "default/not-specified"
"""Infinity's clients send this name where their caller names no model."""


class RequestFields(ImageFields, kw_only=True):
    """Fields of a body; those that are not named here or in a subclass are ignored.

    What is of the wrong type is refused in those, too, that have no meaning here.
    """

    model: ModelName | None = None
    request_id: Annotated[str, msgspec.Meta(min_length=1, max_length=256)] | None = None
    """Becomes part of the answer's `id`; without it the one of `X-Request-Id` does."""
    user: str | None = None
    """Of no meaning here."""
    priority: int | None = None
    """Of no meaning here: requests share the device by what they ask of it."""
    cache_salt: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_SALT_CHARACTERS)] | None = None
    """See `Request.cache_salt`."""
    padding: Literal["max_length", "do_not_pad"] | None = None
    """Of no meaning here: a model gets the padding that it was trained with."""

    def __post_init__(self) -> None:
        if self.model == NOT_SPECIFIED:
            self.model = None
