"""Fields that vLLM accepts in every request, whatever the task."""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias

import msgspec

from staged_pool.api.wire.images import ImageFields
from staged_pool.runtime.requests import MAX_SALT_CHARACTERS

ModelName: TypeAlias = Annotated[str, msgspec.Meta(max_length=1024)]
RequestId: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
MaxTokens: TypeAlias = Annotated[int, msgspec.Meta(ge=-1)]
Limit: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
Dimensions: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]

ANY_JSON: Final = {"type": ["object", "array", "string", "number", "boolean", "null"]}
"""JSON schema of any value. An empty schema would be taken for a missing one."""

NOT_SPECIFIED: Final = "default/not-specified"
"""The model name that Infinity's clients send if their caller names none."""


class RequestFields(ImageFields, kw_only=True):
    """Fields of a body; fields that neither this class nor a subclass names are ignored.

    A value of the wrong type is rejected even in a field that has no effect.
    """

    model: ModelName | None = None
    request_id: RequestId | None = None
    """Part of the answer's `id`; default: the value of `X-Request-Id`."""
    user: str | None = None
    """Ignored."""
    priority: int | None = None
    """Ignored: the scheduler shares the device by tokens."""
    cache_salt: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_SALT_CHARACTERS)] | None = None
    """See `Request.cache_salt`."""
    padding: Literal["max_length", "do_not_pad"] | None = None
    """Ignored: a model gets the padding that it was trained with."""

    def __post_init__(self) -> None:
        if self.model == NOT_SPECIFIED:
            self.model = None
