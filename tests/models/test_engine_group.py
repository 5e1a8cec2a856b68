"""Models that come and go in one process, while others serve."""

from __future__ import annotations

import gc
import os
import shutil
import threading
import weakref
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.engine.open import open_engine, open_engines
from staged_pool.stages.errors import ConfigError, EngineStopped
from tests.models.conftest import TinyFolder
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

TEXTS = ["A man is eating food.", "short"]


@pytest.fixture
def mean(tiny_folder: TinyFolder) -> Path:
    """Built before the event loop runs, which must not be blocked."""
    return tiny_folder("bert-mean")


@pytest.fixture
def cls(tiny_folder: TinyFolder) -> Path:
    return tiny_folder("bert-cls")


@pytest.fixture
def clip(tiny_folder: TinyFolder) -> Path:
    return tiny_folder("clip")


@pytest.fixture
def broken(mean: Path, tmp_path: Path) -> Path:
    """A folder whose weights are those of another model."""
    folder = shutil.copytree(mean, tmp_path / "broken")
    save_file({"other": torch.zeros(2)}, folder / "model.safetensors", {"format": "pt"})
    return folder


def config(folder: Path, **settings: Any) -> EngineConfig:
    return EngineConfig(model=str(folder), dtype="float32", torch_threads=1, **settings)


def threads_of_engines() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("staged-pool"))


def modules() -> list[torch.nn.Module]:
    return [each for each in gc.get_objects() if issubclass(type(each), torch.nn.Module)]


async def open_files() -> int:
    return len(await anyio.to_thread.run_sync(os.listdir, "/proc/self/fd"))


async def vectors(engine: Engine) -> Any:
    return (await engine.embed(TEXTS)).embeddings


async def test_a_model_joins_and_leaves_while_another_serves(mean: Path, cls: Path) -> None:
    async with open_engine(config(cls)) as alone:
        wanted = await vectors(alone)
    async with open_engines([config(mean, served_name="mean")]) as engines:
        before = await vectors(engines["mean"])
        stop = anyio.Event()

        async def keep_asking() -> None:
            while not stop.is_set():
                np.testing.assert_array_equal(await vectors(engines["mean"]), before)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(keep_asking)
            joined = await engines.load(config(cls, served_name="cls"))
            assert tuple(engines) == ("mean", "cls")
            np.testing.assert_allclose(await vectors(joined), wanted, atol=1e-5)
            await engines.unload(joined)
            stop.set()
        assert tuple(engines) == ("mean",)
        with pytest.raises(EngineStopped):
            await joined.embed("a")


async def test_requests_in_flight_end_on_the_model_that_leaves(mean: Path, cls: Path) -> None:
    async with open_engines([config(mean, served_name="mean")]) as engines:
        leaving = await engines.load(config(cls, served_name="cls"))
        answers: list[Any] = []

        async def ask() -> None:
            answers.append(await vectors(leaving))

        async with anyio.create_task_group() as tasks:
            for _ in range(20):
                tasks.start_soon(ask)
            await until(lambda: leaving.statistics().admission.requests == 20)
            await engines.unload(leaving)
        assert len(answers) == 20


async def test_a_load_that_fails_changes_nothing(mean: Path, broken: Path, tmp_path: Path) -> None:
    async with open_engines([config(mean, served_name="mean")]) as engines:
        await vectors(engines["mean"])
        threads = threads_of_engines()
        for wrong in (
            config(tmp_path, served_name="empty"),
            config(mean, served_name="other", preprocess_limit=2),
            config(broken, served_name="broken"),
        ):
            with pytest.raises(ConfigError):
                await engines.load(wrong)
            assert tuple(engines) == ("mean",)
        await until(lambda: threads_of_engines() == threads)
        assert len(await vectors(engines["mean"])) == 2


async def test_the_later_of_two_models_of_one_name_stays(mean: Path, cls: Path) -> None:
    async with open_engines([config(mean, served_name="it")]) as engines:
        earlier, old = engines["it"], await vectors(engines["it"])
        later = await engines.load(config(cls, served_name="it"))
        assert engines["it"] is later
        new = await vectors(later)
        np.testing.assert_array_equal(await vectors(earlier), old)  # both serve until one is unloaded
        await engines.unload(earlier)
        assert dict(engines) == {"it": later}
        np.testing.assert_array_equal(await vectors(later), new)


async def test_threads_come_with_a_model_of_images_and_go_with_it(mean: Path, clip: Path) -> None:
    async with open_engines([config(mean, served_name="mean")]) as engines:
        before = threads_of_engines()
        images = await engines.load(config(clip, served_name="clip"))
        assert len(threads_of_engines()) > len(before)
        await engines.unload(images)
        await until(lambda: threads_of_engines() == before)
        await vectors(engines["mean"])
        again = await engines.load(config(clip, served_name="clip"))
        assert len(await vectors(again)) == 2


async def test_the_weights_of_a_model_are_gone_with_it_without_the_garbage_collector(mean: Path, cls: Path) -> None:
    async with open_engines([config(mean, served_name="mean")]) as engines:
        await engines.load(config(cls, served_name="first"))
        files = await open_files()
        known = set(map(id, modules()))
        leaving = await engines.load(config(cls, served_name="cls"))
        await vectors(leaving)
        layers = [weakref.ref(each) for each in modules() if id(each) not in known]
        assert layers
        gc.disable()
        try:
            await engines.unload(leaving)
            assert [layer for layer in layers if layer() is not None] == []
        finally:
            gc.enable()
        assert await open_files() <= files  # those of another test may be closed meanwhile


async def test_all_models_end_with_the_block_those_that_joined_too(mean: Path, cls: Path) -> None:
    before = threads_of_engines()  # engines of other tests may run in this process
    async with open_engines([config(mean, served_name="mean")]) as engines:
        joined = await engines.load(config(cls, served_name="cls"))
    with pytest.raises(EngineStopped):
        await joined.embed("a")
    assert threads_of_engines() == before


async def test_a_cancelled_load_leaves_nothing(mean: Path, cls: Path) -> None:
    async with open_engines([config(mean, served_name="mean")]) as engines:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engines.load, config(cls, served_name="cls"))
            await until(lambda: any("loader" in name for name in threads_of_engines()))
            tasks.cancel_scope.cancel()
        assert tuple(engines) == ("mean",)
        assert not any("loader" in name for name in threads_of_engines())
        assert len(await vectors(engines["mean"])) == 2
