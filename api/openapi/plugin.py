"""Type of the answers of plugins, for `/openapi.json`."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from staged_pool.api.openapi.answers import AnswerSchema
from staged_pool.api.wire.fields import ANY_JSON


class PluginOutput(AnswerSchema):
    """Output of a plugin for `data`."""

    request_id: str
    created_at: int
    """Seconds since 1970."""
    data: Annotated[Any, msgspec.Meta(extra_json_schema=ANY_JSON)]
