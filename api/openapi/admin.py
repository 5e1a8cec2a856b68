"""Operations of operators' routes, and the types of their answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

import msgspec

from staged_pool.api.addresses import ADMIN_MODELS, ONE_ADMIN_MODEL
from staged_pool.api.config import MAX_TIMEOUT_S
from staged_pool.api.openapi.answers import AnswerSchema
from staged_pool.api.openapi.operation import Operation, get


class AdminModel(AnswerSchema):
    """One model of the server."""

    object: Literal["model"]
    name: str
    """Served name."""
    model: str | None
    """Folder or hub id."""
    state: Literal["loading", "ready", "draining", "failed"]
    """Two models may have one name; at most one of them is ready."""
    reason: str | None
    """Reason of a failed load."""
    since: float
    """Unix time in seconds at which the state began."""
    last_used: float | None
    """Unix time in seconds of the last request; null if there was none."""
    in_flight: int
    """Requests in flight."""
    weights_bytes: int
    """Bytes of its weights on all devices; 0 until they are loaded."""
    pinned: bool
    """It is not unloaded when another load needs memory."""


class AdminModels(AnswerSchema):
    """All models of the server."""

    object: Literal["list"]
    data: list[AdminModel]
    weights_bytes: int
    """Bytes of the weights of all models."""
    models_memory_bytes: int | None
    """Limit of these bytes; null for none."""


class AdminLoad(msgspec.Struct):
    """A model to load. Further fields are settings of a model, by the names of their flags without dashes in front."""

    name: Annotated[str, msgspec.Meta(min_length=1)]
    """Name to serve it under. A model of this name is replaced, without a failed request."""
    model: Annotated[str, msgspec.Meta(min_length=1)]
    """Folder, or hub id."""
    pin: bool | None = None
    """Keep it when another load needs memory. Models given at the start are kept."""


_WAIT: Final[Mapping[str, Mapping[str, Any]]] = {
    "wait": {
        "type": "number",
        "minimum": 0,
        "maximum": MAX_TIMEOUT_S,
        "description": "Seconds to wait for the end; then the answer is 202, and the operation goes on. "
        "Without it, the answer waits as long as it takes.",
    }
}

ADMIN_OPERATIONS: Final[Mapping[str, Mapping[str, Operation]]] = {
    ADMIN_MODELS: {
        **get("List the models and their states", "Models", AdminModels),
        "POST": Operation(
            summary="Load a model, and switch to it",
            tag="Models",
            text="The model is loaded while the others serve. Then requests go to it. A model of the same name "
            "finishes its requests in flight, and is unloaded. A failed load changes nothing.",
            body=(AdminLoad,),
            answer=(AdminModel,),
            query=_WAIT,
            conflicts=True,
            loads=True,
            examples={"load": {"name": "small", "model": "/models/all-MiniLM-L6-v2", "max-batch-items": 64}},
        ),
    },
    ONE_ADMIN_MODEL: {
        **get("One model", "Models", AdminModel),
        "DELETE": Operation(
            summary="Drain and unload a model",
            tag="Models",
            text="The only model cannot be removed, nor one that a pipeline, a plugin or a batch uses.",
            answer=(AdminModel,),
            query=_WAIT,
            conflicts=True,
            loads=True,
        ),
    },
}
"""Operations of the routes that `--admin-api-key` turns on."""
