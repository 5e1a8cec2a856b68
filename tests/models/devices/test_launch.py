"""Forwards that begin one after the other and overlap, on one or several devices."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import cast

import anyio
import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.open import open_engine
from staged_pool.runtime.models.devices.launch import Launcher, Replica, Replicas
from staged_pool.runtime.models.encoder import compute
from staged_pool.runtime.models.kernels.transfer import Later
from staged_pool.runtime.models.load import load_model
from staged_pool.runtime.models.towers.tower import Tower
from staged_pool.runtime.payloads import Payload, Row, TokenSequence, Values
from staged_pool.runtime.requests import DENSE_ONLY, Output
from staged_pool.runtime.threads.device import DeviceThreads
from staged_pool.stages.errors import DeviceLost, EngineStopped
from tests.models.conftest import LoadTiny, TinyFolder
from tests.support.gates import Gate
from tests.support.waiting import until

CPU = torch.device("cpu")


class GatedTower:
    """Begins at once, and is done when a test says so. Counts how many begin at the same time."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.done = [Gate() for _ in range(4)]
        self.at_launch: Gate | None = None
        self.launching = 0
        self.launched_at_once = 0

    def launch(self, payloads: Sequence[Payload]) -> Mapping[Output, Later[Sequence[Values]]]:
        number = cast(TokenSequence, payloads[0]).ids[0]
        self.launching += 1
        self.launched_at_once = max(self.launched_at_once, self.launching)
        self.begun.append(number)
        if self.at_launch is not None:
            self.at_launch()
        self.launching -= 1

        def later() -> Sequence[Values]:
            self.done[number]()
            return [np.full(1, number, np.float32)]

        return {Output.DENSE: later}


def replica_of(tower: GatedTower) -> Replica:
    return Replica(CPU, {"text": cast(Tower, tower)}, {"text": Launcher(CPU)})


def batch(number: int) -> Sequence[TokenSequence]:
    return [TokenSequence([number], DENSE_ONLY)]


@pytest.mark.anyio
async def test_the_next_forward_begins_before_the_one_that_runs_has_ended() -> None:
    tower = GatedTower()
    replica = replica_of(tower)
    ended: list[float] = []

    async def run(number: int) -> None:
        (row,) = await device(lambda payloads: compute(replica, payloads), batch(number))
        assert isinstance(row, Row)
        ended.append(float(cast("np.ndarray[tuple[int], np.dtype[np.float32]]", row.values[Output.DENSE])[0]))

    async with DeviceThreads("test device", watchdog_s=30).running(2) as device, anyio.create_task_group() as tasks:
        tasks.start_soon(run, 0)
        await tower.done[0].arrived()
        tasks.start_soon(run, 1)
        await tower.done[1].arrived()
        tasks.start_soon(run, 2)
        await anyio.wait_all_tasks_blocked()
        assert tower.begun == [0, 1]  # two are enough to keep a device busy
        assert ended == []
        tower.done[0].open()
        await tower.done[2].arrived()
        await until(lambda: ended == [0])
        for gate in tower.done:
            gate.open()
    assert tower.begun == [0, 1, 2]


@pytest.mark.anyio
async def test_no_two_forwards_begin_at_the_same_time() -> None:
    tower = GatedTower()
    tower.at_launch = gate = Gate()
    replica = replica_of(tower)
    for done in tower.done:
        done.open()
    async with DeviceThreads("test device", watchdog_s=30).running(2) as device, anyio.create_task_group() as tasks:
        for number in range(2):
            tasks.start_soon(device, lambda payloads: compute(replica, payloads), batch(number))
        await gate.arrived()
        await anyio.wait_all_tasks_blocked()
        assert len(tower.begun) == 1
        gate.open()
    assert sorted(tower.begun) == [0, 1]
    assert tower.launched_at_once == 1


def test_a_forward_goes_to_the_device_with_the_fewest() -> None:
    replicas = Replicas([Replica(CPU, {}) for _ in range(3)])
    first, second, third = replicas
    with replicas.least_busy(5) as one, replicas.least_busy(6) as two:
        assert (one, two) == (first, second)
        with replicas.least_busy(7) as three, replicas.least_busy(8) as four:
            assert (three, four) == (third, first)
        with replicas.least_busy(9) as five:
            assert five is third
        assert [one.running for one in replicas] == [1, 1, 0]
    assert [(one.running, one.batches, one.tokens) for one in replicas.statistics()] == [
        (0, 2, 13),
        (0, 1, 6),
        (0, 2, 16),
    ]


def test_a_forward_that_fails_is_on_its_device_no_more() -> None:
    replicas = Replicas([Replica(CPU, {})])
    with pytest.raises(ValueError, match="mine"), replicas.least_busy(5):
        raise ValueError("mine")
    assert replicas.statistics()[0].running == 0


def test_each_device_has_weights_of_its_own_that_give_the_same(tiny_folder: TinyFolder, load_tiny: LoadTiny) -> None:
    model = load_model(EngineConfig(model=str(tiny_folder("bert-mean")), dtype="float32", device="cpu,cpu"))
    assert model.card.device == "cpu,cpu"
    assert model.card.forward_workers >= 2
    first, second = (replica.towers["text"].transformer.model for replica in model.replicas)  # type: ignore[attr-defined]
    assert not {p.data_ptr() for p in first.parameters()} & {p.data_ptr() for p in second.parameters()}
    given = [TokenSequence([2, 5, 6, 3], DENSE_ONLY), TokenSequence([2, 7, 3], DENSE_ONLY)]
    wanted = load_tiny("bert-mean").forward(given)
    for replica in model.replicas:
        for row, same in zip(compute(replica, given), wanted, strict=True):
            assert isinstance(row, Row)
            assert isinstance(same, Row)
            assert_allclose(row.values[Output.DENSE], same.values[Output.DENSE], atol=1e-5)  # type: ignore[arg-type]


@pytest.fixture
def on_two_devices(tiny_folder: TinyFolder) -> EngineConfig:
    folder = str(tiny_folder("bert-mean"))
    return EngineConfig(model=folder, dtype="float32", device="cpu,cpu", forward_workers=2, max_batch_tokens=8)


@pytest.mark.anyio
async def test_two_devices_take_batches_from_one_waiting_room(
    on_two_devices: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = threading.Barrier(2, timeout=30)
    async with open_engine(on_two_devices) as engine:
        towers = [type(replica.towers["text"]) for replica in engine._model.replicas]  # type: ignore[attr-defined]
        original = towers[0].launch
        begun: list[object] = []

        def launch(self: object, payloads: Sequence[Payload]) -> Mapping[Output, Later[Sequence[Values]]]:
            if len(begun) < 2:
                begun.append(payloads)
                both.wait()
            launched: Mapping[Output, Later[Sequence[Values]]] = original(self, payloads)
            return launched

        monkeypatch.setattr(towers[0], "launch", launch)
        texts = [f"text {number}" for number in range(12)]
        found = await engine.embed(texts)
        assert len(found.embeddings) == 12
        statistics = engine.statistics().device
        await until(lambda: all(one.running == 0 for one in engine.statistics().device.devices))
        assert [one.device for one in statistics.devices] == ["cpu", "cpu"]
        assert all(one.batches for one in statistics.devices)
        assert sum(one.tokens for one in statistics.devices) == statistics.tokens
        await engine.drain(1)


@pytest.mark.anyio
async def test_a_device_that_is_lost_ends_the_engine_although_another_is_left(
    on_two_devices: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    async with open_engine(on_two_devices) as engine, anyio.create_task_group() as tasks:
        first, second = (replica.towers["text"] for replica in engine._model.replicas)  # type: ignore[attr-defined]
        launch = type(first).launch

        def losing(self: object, payloads: Sequence[Payload]) -> Mapping[Output, Later[Sequence[Values]]]:
            if self is second:
                raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
            gate()
            launched: Mapping[Output, Later[Sequence[Values]]] = launch(self, payloads)
            return launched

        monkeypatch.setattr(type(first), "launch", losing)
        outcomes: list[str] = []

        async def ask(text: str) -> None:
            try:
                await engine.embed(text)
            except (EngineStopped, DeviceLost) as error:
                outcomes.append(str(error))

        tasks.start_soon(ask, "held up")
        await gate.arrived()
        tasks.start_soon(ask, "lost")
        fault = await engine.wait_broken()
        assert "illegal memory access" in fault
        await until(lambda: len(outcomes) == 2)
        gate.open()
    assert all("illegal memory access" in outcome for outcome in outcomes)
