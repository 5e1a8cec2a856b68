"""Short texts beside large requests, on one engine."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from perf.tools.servers import Backend, Options
from perf.tools.workers import worker
from perf.under_load.crowd import Crowd, CrowdedEngine
from tests.api.conftest import tiny_folder  # noqa: F401  # a fixture


@pytest.mark.parametrize("backend", ["asyncio", pytest.param("trio", marks=pytest.mark.long)])
def test_each_short_text_is_timed_beside_the_crowd(backend: Backend, tiny_folder: Path) -> None:  # noqa: F811
    options = Options(model=str(tiny_folder), torch_threads=1, backend=backend)
    with worker(partial(CrowdedEngine, options)) as beside:
        times_ms = beside(Crowd(large=2, tenant="a", calls=3, settle_s=0.1))
    assert len(times_ms) == 3
    assert min(times_ms) > 0
