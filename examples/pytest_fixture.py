"""Tests of a program that searches, with one engine for all of them.

Run them with `pytest pytest_fixture.py`. `MODEL` is a folder or a hub id. AnyIO, which is installed with staged-pool,
brings the plugin for async tests and fixtures.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

import pytest

import staged_pool

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"  # or "trio"


@pytest.fixture(scope="session")
async def engine() -> AsyncIterator[staged_pool.Engine]:
    """The engine of all tests, loaded once in the event loop that they share."""
    config = staged_pool.EngineConfig(model=os.environ.get("MODEL"))
    async with staged_pool.open_engine(config) as engine:
        yield engine


async def search(engine: staged_pool.Engine, query: str, texts: list[str]) -> str:
    """The code under test."""
    result = await engine.rerank(query, texts, top_n=1)
    return texts[result.ranking[0].index]


async def test_the_nearest_text_is_found(engine: staged_pool.Engine) -> None:
    texts = ["A man is eating food.", "A plane is taking off."]
    assert await search(engine, "A man is eating food.", texts) == texts[0]


async def test_an_empty_query_is_rejected(engine: staged_pool.Engine) -> None:
    with pytest.raises(staged_pool.InvalidInput):
        await search(engine, "", ["A plane is taking off."])
