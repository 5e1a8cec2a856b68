"""Several models in one process, on one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.open import open_engine, open_engines
from staged_pool.stages.errors import ConfigError, EngineStopped
from tests.models.conftest import TinyFolder

pytestmark = pytest.mark.anyio

KINDS = ("bert-mean", "bert-cls", "roberta-mean")

TEXTS = ["A man is eating food.", "short", "Someone has a meal."]


@pytest.fixture
def folders(tiny_folder: TinyFolder) -> dict[str, Path]:
    """Built before the event loop runs, which must not be blocked."""
    return {kind: tiny_folder(kind) for kind in KINDS}


def config(folder: Path, **settings: Any) -> EngineConfig:
    return EngineConfig(model=str(folder), dtype="float32", torch_threads=1, **settings)


async def test_each_model_answers_as_it_does_alone_while_all_are_asked(folders: dict[str, Path]) -> None:
    wanted = {}
    for kind in KINDS:
        async with open_engine(config(folders[kind])) as engine:
            wanted[kind] = (await engine.embed(TEXTS)).embeddings
    async with open_engines([config(folders[kind]) for kind in KINDS]) as engines:
        assert tuple(engines) == KINDS
        got: dict[str, list[Any]] = {kind: [] for kind in KINDS}

        async def ask(kind: str) -> None:
            got[kind].append((await engines[kind].embed(TEXTS)).embeddings)

        async with anyio.create_task_group() as tasks:
            for _ in range(10):
                for kind in KINDS:
                    tasks.start_soon(ask, kind)
    for kind in KINDS:
        assert len(got[kind]) == 10
        for embeddings in got[kind]:
            np.testing.assert_allclose(embeddings, wanted[kind], atol=1e-5)


async def test_all_of_them_end_with_the_block(folders: dict[str, Path]) -> None:
    async with open_engines([config(folders["bert-mean"]), config(folders["bert-cls"])]) as engines:
        pass
    for engine in engines.values():
        with pytest.raises(EngineStopped):
            await engine.embed("late")


async def test_two_models_of_one_name_are_rejected(folders: dict[str, Path]) -> None:
    folder = folders["bert-mean"]
    with pytest.raises(ConfigError, match="served_name='bert-mean': two models"):
        async with open_engines([config(folder), config(folder)]):
            pass
    async with open_engines([config(folder), config(folder, served_name="again")]) as engines:
        assert tuple(engines) == ("bert-mean", "again")


async def test_two_models_that_are_given_one_name_are_rejected_before_any_is_loaded(tmp_path: Path) -> None:
    missing = config(tmp_path / "missing", served_name="one")
    with pytest.raises(ConfigError, match="served_name='one': two models"):
        async with open_engines([missing, missing]):
            pass


async def test_settings_of_what_is_shared_must_agree(folders: dict[str, Path]) -> None:
    folder = folders["bert-mean"]
    with pytest.raises(ConfigError, match="preprocess_limit=2 and 4: models that share"):
        async with open_engines([config(folder), config(folder, served_name="other", preprocess_limit=2)]):
            pass
    with pytest.raises(ConfigError, match="no model"):
        async with open_engines([]):
            pass
