"""A cluster of Ray, and a tiny model with known vectors."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
import pytest
from numpy.typing import NDArray

from perf.tools.known_vectors import known_vectors, tiny_model
from staged_pool.runtime.config import EngineConfig

if TYPE_CHECKING:
    from perf.tools.ray_cluster import ServeCluster

with warnings.catch_warnings(), suppress(ModuleNotFoundError):
    warnings.simplefilter("ignore")  # Ray's own imports warn, and warnings are errors here
    import ray.serve  # noqa: F401


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny", served_name="tiny")


@pytest.fixture(scope="session")
def vectors(model: EngineConfig) -> Mapping[str, NDArray[np.float32]]:
    return known_vectors(model)


@pytest.fixture(scope="session")
def cluster() -> Iterator[ServeCluster]:
    from perf.tools.ray_cluster import serve_cluster

    with serve_cluster([0, 1, 1]) as cluster:
        yield cluster
