"""Pooling models (embeddings, scores, labels) in your own program, or from a server.

In a script or a notebook:

    with staged_pool.Pool("...") as pool:
        result = pool.embed(["a query", "a passage"])
        result.embeddings  # float32 [2, width]

In an asyncio or trio program:

    async with staged_pool.open_engine(staged_pool.EngineConfig(model="...")) as engine:
        result = await engine.embed(["a query", "a passage"])

From a server, with the same methods (`AsyncClient` on asyncio and trio):

    with staged_pool.Client("http://127.0.0.1:8000") as client:
        result = client.embed(["a query", "a passage"])

All errors are subclasses of `StagedPoolError`.
"""

from typing import TYPE_CHECKING, Any, Final

from staged_pool.runtime.version import VERSION

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
    "Embedding",
    "Engine",
    "EngineConfig",
    "EngineStatistics",
    "EngineStopped",
    "Entity",
    "Image",
    "InvalidArgument",
    "InvalidInput",
    "ItemError",
    "Labelled",
    "MediaTimedOut",
    "MediaUnavailable",
    "ModelCard",
    "ModelFailed",
    "ModelInputs",
    "OutOfMemory",
    "Output",
    "Overloaded",
    "PairInput",
    "Phase",
    "Pipeline",
    "PipelineItem",
    "PipelineResult",
    "PipelineStage",
    "PipelineStatistics",
    "PluginContext",
    "PluginFailed",
    "PluginSetup",
    "Pool",
    "Priority",
    "Processor",
    "Ranked",
    "RerankResult",
    "ResultStream",
    "RetryPolicy",
    "Row",
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
    "Video",
    "VllmPlugin",
    "__version__",
    "open_engine",
    "open_engines",
]

# A name is imported at its first use: the command line, or a program with a client, needs few of them.
if TYPE_CHECKING:
    from staged_pool.client import AsyncClient, Client, RetryPolicy
    from staged_pool.pool import Pool, ResultStream
    from staged_pool.runtime.card import ModelCard
    from staged_pool.runtime.config import EngineConfig
    from staged_pool.runtime.engine.engine import Engine
    from staged_pool.runtime.engine.open import open_engine, open_engines
    from staged_pool.runtime.payloads import Row, SparseVector
    from staged_pool.runtime.pipelines.declaration import PipelineStage
    from staged_pool.runtime.pipelines.items import Embedding, ItemError, Labelled, PipelineItem, PipelineResult
    from staged_pool.runtime.pipelines.pipeline import Pipeline
    from staged_pool.runtime.pipelines.statistics import PipelineStatistics
    from staged_pool.runtime.plugins.processor import ModelInputs, PluginContext, PluginSetup, Processor
    from staged_pool.runtime.plugins.vllm_style import VllmPlugin
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
        Video,
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
    from staged_pool.runtime.tokens import Tokens
    from staged_pool.stages.errors import (
        Abandoned,
        ConfigError,
        DeadlineExceeded,
        DeviceLost,
        EngineStopped,
        InvalidArgument,
        InvalidInput,
        MediaTimedOut,
        MediaUnavailable,
        ModelFailed,
        OutOfMemory,
        Overloaded,
        PluginFailed,
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
else:
    from importlib import import_module

    _NAMES: Final = {
        "staged_pool.client": ("AsyncClient", "Client", "RetryPolicy"),
        "staged_pool.pool": ("Pool", "ResultStream"),
        "staged_pool.runtime.config": ("EngineConfig",),
        "staged_pool.runtime.engine.engine": ("Engine",),
        "staged_pool.runtime.engine.open": ("open_engine", "open_engines"),
        "staged_pool.runtime.card": ("ModelCard",),
        "staged_pool.runtime.payloads": ("Row", "SparseVector"),
        "staged_pool.runtime.plugins.processor": ("ModelInputs", "PluginContext", "PluginSetup", "Processor"),
        "staged_pool.runtime.plugins.vllm_style": ("VllmPlugin",),
        "staged_pool.runtime.pipelines.declaration": ("PipelineStage",),
        "staged_pool.runtime.pipelines.items": (
            "Embedding",
            "ItemError",
            "Labelled",
            "PipelineItem",
            "PipelineResult",
        ),
        "staged_pool.runtime.pipelines.pipeline": ("Pipeline",),
        "staged_pool.runtime.pipelines.statistics": ("PipelineStatistics",),
        "staged_pool.runtime.requests": (
            "MODEL_MAX",
            "Chat",
            "ClassifyRequest",
            "EmbedRequest",
            "Image",
            "Output",
            "PairInput",
            "ScoreRequest",
            "TextInput",
            "TokenClassifyRequest",
            "Video",
        ),
        "staged_pool.runtime.results": (
            "ClassifyResult",
            "EmbedResult",
            "Entity",
            "Ranked",
            "RerankResult",
            "ScoreResult",
            "TokenClassifyResult",
            "Usage",
        ),
        "staged_pool.runtime.statistics": ("EngineStatistics", "Phase"),
        "staged_pool.runtime.tokens": ("Tokens",),
        "staged_pool.stages.errors": (
            "Abandoned",
            "ConfigError",
            "DeadlineExceeded",
            "DeviceLost",
            "EngineStopped",
            "InvalidArgument",
            "InvalidInput",
            "MediaTimedOut",
            "MediaUnavailable",
            "ModelFailed",
            "OutOfMemory",
            "Overloaded",
            "PluginFailed",
            "StagedPoolError",
            "StageFailed",
            "TooLarge",
            "UnknownModel",
            "Unsupported",
            "UnsupportedMedia",
            "UnusableMedia",
            "UrlNotAllowed",
        ),
        "staged_pool.stages.scheduling.entries": ("Priority",),
    }
    _MODULE_OF: Final = {name: module for module, names in _NAMES.items() for name in names}

    def __getattr__(name: str) -> Any:
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_MODULE_OF[name]), name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
