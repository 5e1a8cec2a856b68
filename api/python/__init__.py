"""Serve pooling models from inside an anyio program: `open_engine`, `EngineConfig`, and what they give and raise.

async with staged_pool.open_engine(staged_pool.EngineConfig(model="...")) as engine:
    result = await engine.embed(["a query", "a passage"])
"""

from importlib.metadata import version

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine import Engine, open_engine
from staged_pool.runtime.model import ModelCard, Tokens
from staged_pool.runtime.results import EmbedResult, Usage
from staged_pool.runtime.statistics import EngineStatistics, Phase
from staged_pool.stages.errors import (
    Abandoned,
    ConfigError,
    DeadlineExceeded,
    DeviceLost,
    EngineStopped,
    InvalidInput,
    ModelFailed,
    OutOfMemory,
    Overloaded,
    StagedPoolError,
    StageFailed,
    TooLarge,
    UnknownModel,
)
from staged_pool.stages.work import MODEL_MAX, EmbedRequest, TextInput

__version__ = version("staged-pool")

__all__ = [
    "MODEL_MAX",
    "Abandoned",
    "ConfigError",
    "DeadlineExceeded",
    "DeviceLost",
    "EmbedRequest",
    "EmbedResult",
    "Engine",
    "EngineConfig",
    "EngineStatistics",
    "EngineStopped",
    "InvalidInput",
    "ModelCard",
    "ModelFailed",
    "OutOfMemory",
    "Overloaded",
    "Phase",
    "StageFailed",
    "StagedPoolError",
    "TextInput",
    "Tokens",
    "TooLarge",
    "UnknownModel",
    "Usage",
    "__version__",
    "open_engine",
]
