"""Checked by mypy, never run: the types that users of the library see."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import assert_type

import numpy as np
from numpy.typing import NDArray

import staged_pool


async def program() -> AsyncIterator[None]:
    opened = staged_pool.open_engine(staged_pool.EngineConfig(model="folder"))
    engine: AbstractAsyncContextManager[staged_pool.Engine] = opened
    async with engine as running:
        assert_type(running, staged_pool.Engine)
        result = await running.embed(["a query", "a passage"], dimensions=2, timeout_s=1.0)
        assert_type(result, staged_pool.EmbedResult)
        assert_type(result.embeddings, NDArray[np.float32])
        assert_type(result.usage.prompt_tokens, int)
        assert_type(running.card, staged_pool.ModelCard)
        assert_type(running.statistics(), staged_pool.EngineStatistics)
        request = staged_pool.EmbedRequest(inputs=(staged_pool.TextInput("text"),))
        answer = await running.submit(lambda: request, lambda result: result.embeddings.tobytes())
        assert_type(answer, bytes)
    yield
