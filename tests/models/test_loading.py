"""Loads of models beside others that serve: their deadline, their memory, and what a hanging one holds up."""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.from_thread
import pytest
import torch
from safetensors.torch import save_file

import staged_pool
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine import model_loading
from staged_pool.runtime.engine.engine_group import EngineGroup
from staged_pool.runtime.engine.model_loading import LoadThread
from staged_pool.runtime.engine.open import open_engine, open_engines
from staged_pool.runtime.load_deadline import LoadDeadline, LoadTimedOut
from staged_pool.runtime.memory.governor import MemoryGovernor, NoRoom
from staged_pool.runtime.models import load as load_module
from staged_pool.runtime.threads.dedicated_threads import DedicatedThreads
from staged_pool.stages import foreign_file
from staged_pool.stages.errors import ConfigError
from tests.models.conftest import TinyFolder
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


@pytest.fixture
def mean(tiny_folder: TinyFolder) -> Path:
    """Built before the event loop runs, which must not be blocked."""
    return tiny_folder("bert-mean")


@pytest.fixture
def cls(tiny_folder: TinyFolder) -> Path:
    return tiny_folder("bert-cls")


@pytest.fixture
def broken(mean: Path, tmp_path: Path) -> Path:
    """A folder whose weights are those of another model, found out when they are read."""
    folder = shutil.copytree(mean, tmp_path / "broken")
    save_file({"other": torch.zeros(10**6)}, folder / "model.safetensors", {"format": "pt"})
    return folder


def config(folder: Path, **settings: Any) -> EngineConfig:
    return EngineConfig(model=str(folder), dtype="float32", torch_threads=1, **settings)


class Hold:
    """Holds each load in its thread, and gives loads little time while it does."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.timeout_s = 600.0
        self.began = 0

    def close(self, timeout_s: float = 1.0) -> None:
        """Hold the loads from now on; each is given up after `timeout_s` seconds."""
        self.opened.clear()
        self.timeout_s = timeout_s

    def open(self) -> None:
        """Let held loads go on, and give later ones the usual time."""
        self.opened.set()
        self.timeout_s = 600.0


@pytest.fixture
def hold(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hold]:
    found, load = Hold(), model_loading._load
    found.open()

    def held(*given: Any) -> Any:
        found.began += 1
        assert found.opened.wait(60)
        return load(*given)

    def loader(group: EngineGroup[Any], threads: DedicatedThreads) -> LoadThread:
        return LoadThread(threads, found.timeout_s, group._governor, group._overdue)

    monkeypatch.setattr(model_loading, "_load", held)
    monkeypatch.setattr(EngineGroup, "_loader", loader)
    yield found
    found.open()


async def test_a_load_that_hangs_is_given_up_and_what_serves_goes_on(hold: Hold, mean: Path, cls: Path) -> None:
    async with open_engines([config(mean, served_name="mean")]) as engines:
        hold.close()
        with pytest.raises(LoadTimedOut, match=r"^load_timeout_s=1: the model was not loaded within that time"):
            await engines.load(config(cls, served_name="cls"))
        assert tuple(engines) == ("mean",)
        assert len((await engines["mean"].embed("a text")).embeddings) == 1
        began = hold.began
        with pytest.raises(LoadTimedOut, match="an earlier load has passed its deadline and still hangs"):
            await engines.load(config(cls, served_name="cls"))
        assert hold.began == began  # rejected before anything of it began
        hold.open()
        await until(lambda: not any("loader" in thread.name for thread in threading.enumerate()))
        joined = await engines.load(config(cls, served_name="cls"))
        assert len((await joined.embed("a text")).embeddings) == 1


async def test_a_load_that_waits_behind_a_hanging_one_is_told_so(hold: Hold, mean: Path, cls: Path) -> None:
    async with open_engines([config(mean, served_name="mean")]) as engines:
        hold.close()
        failed: list[str] = []

        async def load(name: str) -> None:
            with pytest.raises(LoadTimedOut) as error:
                await engines.load(config(cls, served_name=name))
            failed.append(str(error.value))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(load, "first")
            tasks.start_soon(load, "second")
        assert failed[0].startswith("load_timeout_s=1: ")
        assert "an earlier load" in failed[1]


async def test_of_two_loads_at_once_the_second_waits(hold: Hold, mean: Path, cls: Path) -> None:
    async with open_engines([config(mean, served_name="mean")]) as engines:
        hold.close(timeout_s=600)
        began = hold.began
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engines.load, config(cls, served_name="first"))
            tasks.start_soon(engines.load, config(cls, served_name="second"))
            await until(lambda: hold.began == began + 1)
            assert len((await engines["mean"].embed("a text")).embeddings) == 1
            assert hold.began == began + 1
            hold.open()
        assert sorted(engines) == ["first", "mean", "second"]


async def test_a_start_that_hangs_ends_with_the_reason(hold: Hold, mean: Path) -> None:
    hold.close()
    with pytest.raises(ConfigError, match=r"^load_timeout_s=1: "):
        async with open_engine(config(mean)):
            pass


async def test_a_cancelled_load_that_hangs_keeps_its_caller_until_the_deadline_only(
    hold: Hold, mean: Path, cls: Path
) -> None:
    async with open_engines([config(mean, served_name="mean")]) as engines:
        hold.close()
        began = hold.began
        late: list[LoadTimedOut] = []
        with anyio.CancelScope() as scope:

            async def load() -> None:
                try:
                    await engines.load(config(cls, served_name="cls"))
                except LoadTimedOut as error:
                    late.append(error)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(load)
                await until(lambda: hold.began > began)
                scope.cancel()
        assert len(late) == 1
        assert tuple(engines) == ("mean",)


async def test_a_folder_that_cannot_be_read_to_its_end_is_given_up(
    hold: Hold, mean: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = tmp_path / "config.json"  # it stands for a file on a disk that does not answer: a pipe would be rejected
    os.mkfifo(pipe)
    monkeypatch.setattr(foreign_file, "_check", lambda *_: None)
    async with open_engines([config(mean, served_name="mean")]) as engines:
        hold.timeout_s = 1.0
        with pytest.raises(LoadTimedOut):
            await engines.load(config(tmp_path, served_name="pipe"))
        os.close(os.open(pipe, os.O_WRONLY))  # the thread reads an empty file, and ends
        await until(lambda: not any("loader" in thread.name for thread in threading.enumerate()))
        assert len((await engines["mean"].embed("a text")).embeddings) == 1


async def test_what_an_overdue_load_makes_is_closed(
    hold: Hold, mean: Path, cls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = threading.Event()

    class Late:
        def close(self) -> None:
            closed.set()

    async with open_engines([config(mean, served_name="mean")]) as engines:
        hold.close()

        def late(*_: Any) -> Any:
            assert hold.opened.wait(60)
            return [Late()]

        monkeypatch.setattr(model_loading, "_load", late)
        with pytest.raises(LoadTimedOut):
            await engines.load(config(cls, served_name="cls"))
        assert not closed.is_set()
        hold.open()
        await until(closed.is_set)


async def test_a_load_reserves_its_memory_and_gives_it_back(
    mean: Path, cls: Path, broken: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    governor = MemoryGovernor(64 * 2**30)
    seen: list[tuple[int, int]] = []
    build = load_module._load_replicas

    def watched(*given: Any, **more: Any) -> Any:
        seen.append((governor.loading_bytes, governor.budget.limit_bytes))
        return build(*given, **more)

    async with open_engines([config(mean, served_name="mean")], governor) as engines:
        assert governor.loading_bytes == 0
        monkeypatch.setattr(load_module, "_load_replicas", watched)
        before = governor.budget.limit_bytes
        with pytest.raises(ConfigError, match="the weights are not those of a BertModel"):
            await engines.load(config(broken, served_name="broken"))
        assert seen == [(4 * 10**6, before - 4 * 10**6)]
        assert (governor.loading_bytes, governor.budget.limit_bytes) == (0, before)
        joined = await engines.load(config(cls, served_name="cls"))
        assert seen[1][0] > 0
        assert governor.loading_bytes == 0
        await engines.unload(joined)


async def test_a_model_that_memory_has_no_room_for_is_refused_before_it_is_read(
    mean: Path, broken: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    governor = MemoryGovernor(64 * 2**30)
    async with open_engines([config(mean, served_name="mean")], governor) as engines:
        before = governor.budget.limit_bytes
        monkeypatch.setattr(governor._machine, "fullness", lambda limit_bytes: 1.0)
        with pytest.raises(NoRoom, match=r"^The weights of broken take 4 MB of memory, and 0 MB of 68,719 MB are left"):
            await engines.load(config(broken, served_name="broken"))
        assert (governor.loading_bytes, governor.budget.limit_bytes) == (0, before)
        assert len((await engines["mean"].embed("a text")).embeddings) == 1


def test_a_load_ends_itself_between_its_steps_once_it_is_given_up(mean: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deadline = LoadDeadline(10)
    build = load_module._load_replicas

    def slow(*given: Any, **more: Any) -> Any:
        assert deadline.give_up()  # as its caller does once the limit is over
        return build(*given, **more)

    monkeypatch.setattr(load_module, "_load_replicas", slow)
    warmed: list[object] = []
    monkeypatch.setattr(load_module, "_prepare_forwards", lambda *given: warmed.append(given))
    with pytest.raises(LoadTimedOut):
        load_module.load_model(config(mean), deadline=deadline)
    assert warmed == []


SOURCES = Path(staged_pool.__file__).parent

CALLERS = {
    "load_transformer": {"runtime/models/load.py"},
    "check_files": {"runtime/models/load.py"},
    "load_model": {"runtime/engine/model_loading.py", "runtime/models/load_shared.py", "api/commands/check.py"},
    "load_sharing": {"runtime/engine/model_loading.py"},
    "check_claimed_size": {"runtime/models/checkpoint/weights.py"},
    "from_pretrained": {
        "runtime/models/checkpoint/configs.py",
        "runtime/models/checkpoint/tokenizer.py",
        "runtime/models/checkpoint/weights.py",
        "runtime/models/folders/vision_embedders.py",  # looks for the text in a model card, and calls nothing
        "runtime/models/images/settings.py",
        "runtime/plugins/vllm_style.py",  # the tokenizer and the image processor of a plugin's own model
    },
}
"""Modules that may call each function by which a model comes into memory: all go through `load_model`."""


@pytest.mark.parametrize("name", CALLERS)
def test_models_come_into_memory_through_one_door(name: str) -> None:
    called = re.compile(rf"(?<!def )\b{name}\b(?!`)")  # also one that is passed on, as to `partial`
    callers = {
        str(file.relative_to(SOURCES))
        for file in SOURCES.rglob("*.py")
        if any(called.search(line) and "import" not in line for line in file.read_text().splitlines())
    }
    assert callers == CALLERS[name]
