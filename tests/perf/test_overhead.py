"""The cost of an embedded engine for its program's event loop."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from perf.cost.overhead import EmbeddedEngine
from perf.tools.servers import Backend, Options
from perf.tools.workers import worker
from tests.api.conftest import tiny_folder  # noqa: F401  # a fixture


@pytest.mark.parametrize("backend", ["asyncio", pytest.param("trio", marks=pytest.mark.long)])
def test_callers_of_an_engine_share_the_calls(backend: Backend, tiny_folder: Path) -> None:  # noqa: F811
    options = Options(model=str(tiny_folder), torch_threads=1, backend=backend)
    with worker(partial(EmbeddedEngine, options, ["one", "two", "three", "four"], 3)) as engine:
        block = engine(7)
    assert len(block.latencies_ms) == 7
    assert 0 < block.loop_ms <= block.cpu_ms
