"""Loads of model folders: the message of a rejected one, or the answer to one question."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.engine.open import open_engine
from staged_pool.runtime.models.load import load_model
from staged_pool.stages.errors import ConfigError


def rejection(folder: Path, **settings: Any) -> str:
    """Return the message of a load that must fail."""
    with pytest.raises(ConfigError) as rejected:
        load_model(EngineConfig(model=str(folder), **settings))
    return str(rejected.value)


def ask(folder: Path, question: Callable[[Engine], Any], **settings: Any) -> Any:
    """Return the answer of an engine on a folder."""

    async def program() -> Any:
        async with open_engine(EngineConfig(model=str(folder), dtype="float32", **settings)) as engine:
            return await question(engine)

    return anyio.run(program)
