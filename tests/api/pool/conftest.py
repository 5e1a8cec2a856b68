from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, ExitStack
from typing import Any, TypeAlias

import pytest

from staged_pool.pool import Pool, owner
from staged_pool.pool.engine_thread import Backend
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.engine import Engine
from tests.servers.engines import engine_on
from tests.support.model import LetterModel

Open: TypeAlias = Callable[..., Pool]


@pytest.fixture
def nothing_blocks_the_event_loop() -> None:
    """Allow what blocks: a pool imports modules, and blocks the thread that uses it."""


@pytest.fixture(params=["asyncio", "trio"])
def backend(request: pytest.FixtureRequest) -> Backend:
    given: Backend = request.param
    return given


@pytest.fixture
def letters(monkeypatch: pytest.MonkeyPatch, backend: Backend) -> Iterator[Open]:
    """Makes pools on a `LetterModel`, and closes them."""
    with ExitStack() as made:

        def make(model: LetterModel | None = None, **settings: Any) -> Pool:
            double = model or LetterModel()

            def opens(config: EngineConfig, *, plugins: object) -> AbstractAsyncContextManager[Engine]:
                return engine_on(double, config)

            monkeypatch.setattr(owner, "open_engine", opens)
            pool = Pool(backend=backend, **settings)
            made.callback(pool.close)
            return pool

        yield make
