"""Pooling models (embeddings, scores, labels) in your own program, or from a server.

In an asyncio or trio program:

    async with staged_pool.open_engine(staged_pool.EngineConfig(model="...")) as engine:
        result = await engine.embed(["a query", "a passage"])
        result.embeddings  # float32 [2, width]

From a server, with the same methods (`AsyncClient` on asyncio and trio):

    with staged_pool.Client("http://127.0.0.1:8000") as client:
        result = client.embed(["a query", "a passage"])

All errors are subclasses of `StagedPoolError`.
"""

from typing import TYPE_CHECKING, Any

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.engine.open import open_engine, open_engines
from staged_pool.runtime.model import ModelCard, SparseVector, Tokens
from staged_pool.runtime.requests import (
    MODEL_MAX,
    Chat,
    ClassifyRequest,
    EmbedRequest,
    Image,
    Output,
    PairInput,
    ScoreRequest,
    TextInput,
    TokenClassifyRequest,
)
from staged_pool.runtime.results import (
    ClassifyResult,
    EmbedResult,
    Entity,
    Ranked,
    RerankResult,
    ScoreResult,
    TokenClassifyResult,
    Usage,
)
from staged_pool.runtime.statistics import EngineStatistics, Phase
from staged_pool.runtime.version import VERSION
from staged_pool.stages.errors import (
    Abandoned,
    ConfigError,
    DeadlineExceeded,
    DeviceLost,
    EngineStopped,
    InvalidInput,
    MediaTimedOut,
    MediaUnavailable,
    ModelFailed,
    OutOfMemory,
    Overloaded,
    StagedPoolError,
    StageFailed,
    TooLarge,
    UnknownModel,
    Unsupported,
    UnsupportedMedia,
    UnusableMedia,
    UrlNotAllowed,
)
from staged_pool.stages.scheduling.entries import Priority

if TYPE_CHECKING:
    from staged_pool.client import AsyncClient, Client, RetryPolicy

__version__ = VERSION

__all__ = [
    "MODEL_MAX",
    "Abandoned",
    "AsyncClient",
    "Chat",
    "ClassifyRequest",
    "ClassifyResult",
    "Client",
    "ConfigError",
    "DeadlineExceeded",
    "DeviceLost",
    "EmbedRequest",
    "EmbedResult",
    "Engine",
    "EngineConfig",
    "EngineStatistics",
    "EngineStopped",
    "Entity",
    "Image",
    "InvalidInput",
    "MediaTimedOut",
    "MediaUnavailable",
    "ModelCard",
    "ModelFailed",
    "OutOfMemory",
    "Output",
    "Overloaded",
    "PairInput",
    "Phase",
    "Priority",
    "Ranked",
    "RerankResult",
    "RetryPolicy",
    "ScoreRequest",
    "ScoreResult",
    "SparseVector",
    "StageFailed",
    "StagedPoolError",
    "TextInput",
    "TokenClassifyRequest",
    "TokenClassifyResult",
    "Tokens",
    "TooLarge",
    "UnknownModel",
    "Unsupported",
    "UnsupportedMedia",
    "UnusableMedia",
    "UrlNotAllowed",
    "Usage",
    "__version__",
    "open_engine",
    "open_engines",
]


def __getattr__(name: str) -> Any:
    """Import the clients at their first use, because that takes longer than all the rest."""
    if name in ("AsyncClient", "Client", "RetryPolicy"):
        from staged_pool import client

        return getattr(client, name)
    raise AttributeError(f"module 'staged_pool' has no attribute {name!r}")
