"""An engine whose device runs several forwards at once."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from anyio.abc import TaskGroup
from numpy.testing import assert_array_equal

from staged_pool.runtime import lanes, opening, pipeline
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.device import DeviceThreads
from staged_pool.runtime.engine import Engine, run_engine
from staged_pool.stages import channel, company
from staged_pool.stages.errors import (
    ConfigError,
    DeviceLost,
    EngineStopped,
    InvalidInput,
    ModelFailed,
    OutOfMemory,
)
from staged_pool.stages.stage import StageOptions
from tests.doubles import CARD, Gate, LetterModel, expected, until

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def every_text_is_worth_a_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "MIN_SHARE_TOKENS", 1)


@asynccontextmanager
async def engine_on(
    model: LetterModel,
    workers: int = 2,
    cores: int | None = None,
    options: StageOptions | None = None,
    **settings: Any,
) -> AsyncIterator[Engine]:
    config = EngineConfig(**settings)
    model.card = replace(CARD, forward_workers=workers)
    async with DeviceThreads("test device", watchdog_s=config.watchdog_s).running() as device:
        device.grow(workers)
        async with run_engine(config, model, device=device, cores=cores, options=options) as engine:
            yield engine
            assert engine.statistics().admission.requests == 0
            stage = engine._pipeline.batch["text"]
            assert (stage.running, stage.running_tokens) == (0, 0)


def busy(engine: Engine) -> tuple[int, int]:
    stage = engine.statistics().stages[2]
    return stage.busy, stage.workers


async def test_a_second_batch_begins_while_the_first_runs_and_a_third_waits() -> None:
    gate = Gate()
    model = LetterModel(on_forward=gate)
    async with engine_on(model) as engine, anyio.create_task_group() as tasks:
        tasks.start_soon(engine.embed, "first")
        await until(lambda: len(model.forwarded) == 1)
        tasks.start_soon(engine.embed, "second")
        await until(lambda: len(model.forwarded) == 2)
        tasks.start_soon(engine.embed, "third")
        await until(lambda: len(model.forwarded) == 2 and engine._pipeline.batch["text"].waiting == 1)
        assert engine._pipeline.batch["text"].running == 2
        assert busy(engine) == (2, 2)
        gate.open()
    assert sorted(model.forwarded) == [["first"], ["second"], ["third"]]


async def test_a_slot_leaves_to_the_others_their_part_of_all_that_waits_and_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lanes, "MIN_SHARE_TOKENS", 6)
    gates = {"run0": Gate(), "run1": Gate()}

    def hold(texts: Sequence[str]) -> None:
        if texts[0] in gates:
            gates[texts[0]](texts)

    model = LetterModel(on_forward=hold)
    async with engine_on(model) as engine, anyio.create_task_group() as tasks:
        stage = engine._pipeline.batch["text"]
        for text, gate in gates.items():
            tasks.start_soon(engine.embed, text)
            await gate.arrived()
        for text in ("wai0", "wai1", "wai2", "wai3", "wai4"):
            tasks.start_soon(engine.embed, text)
        await until(lambda: stage.waiting == 5)
        gates["run0"].open()
        await until(lambda: stage.waiting == 0)
        gates["run1"].open()
    assert [len(texts) for texts in model.forwarded][:3] == [1, 1, 3]  # half of what waits and runs


async def test_where_much_waits_one_batch_more_is_handed_to_the_device() -> None:
    gate = Gate()
    model = LetterModel(on_forward=gate)
    async with engine_on(model, max_batch_tokens=4) as engine, anyio.create_task_group() as tasks:
        stage = engine._pipeline.batch["text"]
        for number in range(2):
            tasks.start_soon(engine.embed, f"run{number}")
            await until(lambda count=number + 1: len(model.forwarded) == count)  # type: ignore[misc]
        tasks.start_soon(engine.embed, "wai0")
        await until(lambda: stage.waiting == 1)
        assert not stage._ahead  # whoever came now would be in the next batch, too
        tasks.start_soon(engine.embed, "wai1")
        await until(lambda: len(stage._ahead) == 1)
        assert stage.waiting == 1
        assert (len(model.forwarded), busy(engine), stage.running) == (2, (2, 2), 2)
        gate.open()
    assert sorted(model.forwarded) == [["run0"], ["run1"], ["wai0"], ["wai1"]]


async def test_what_is_ahead_of_a_gpu_begins_before_the_forward_that_runs_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = Gate()
    model = LetterModel(on_forward=gate, card=replace(CARD, launched_ahead=1))
    monkeypatch.setattr(opening, "_load", lambda config, found: model)
    async with opening.open_engine(EngineConfig(max_batch_tokens=4)) as engine, anyio.create_task_group() as tasks:
        stage = engine._pipeline.batch["text"]
        tasks.start_soon(engine.embed, "runs")
        await gate.arrived()
        for text in ("wai0", "wai1", "wai2"):
            tasks.start_soon(engine.embed, text)
        await until(lambda: len(model.forwarded) == 2)
        assert (busy(engine), stage.running) == ((1, 1), 1)
        await until(lambda: stage.waiting == 2)
        assert len(model.forwarded) == 2
        gate.open()
    assert sorted(model.forwarded) == [["runs"], ["wai0"], ["wai1"], ["wai2"]]


async def test_each_of_several_gpus_has_a_batch_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()
    model = LetterModel(on_forward=gate, card=replace(CARD, forward_workers=2, launched_ahead=1))
    monkeypatch.setattr(opening, "_load", lambda config, found: model)
    async with opening.open_engine(EngineConfig(max_batch_tokens=4)) as engine, anyio.create_task_group() as tasks:
        stage = engine._pipeline.batch["text"]
        for number in range(8):
            tasks.start_soon(engine.embed, f"tex{number}")
        await until(lambda: len(model.forwarded) == 4 and stage.waiting == 4)
        assert (busy(engine), stage.running, len(stage._ahead)) == ((2, 2), 2, 2)
        gate.open()
    assert len(model.forwarded) == 8
    assert busy(engine) == (0, 2)
    assert (stage.running, len(stage._ahead)) == (0, 0)


async def test_every_thread_is_warmed_up_before_the_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    model = LetterModel(card=replace(CARD, forward_workers=2, launched_ahead=1))
    monkeypatch.setattr(opening, "_load", lambda config, found: model)
    async with opening.open_engine(EngineConfig()):
        assert sorted(model.warmed_up) == [("text", f"staged-pool device {number}") for number in range(4)]


async def test_what_is_ahead_is_cancelled_with_the_engine() -> None:
    gate = Gate()
    model = LetterModel(on_forward=gate)
    async with anyio.create_task_group() as tasks:

        async def serve() -> None:
            async with engine_on(model, workers=1, max_batch_tokens=4) as engine, anyio.create_task_group() as clients:
                for text in ("abcd", "bcde", "cdef", "defg"):
                    clients.start_soon(engine.embed, text)
                await gate.arrived()
                await until(lambda: len(engine._pipeline.batch["text"]._ahead) == 1)
                tasks.cancel_scope.cancel()
                with anyio.CancelScope(shield=True):
                    await until(lambda: not engine._pipeline.batch["text"]._ahead)
                gate.open()
                await anyio.lowlevel.checkpoint()

        tasks.start_soon(serve)
    assert len(model.forwarded) == 1


async def test_a_forward_is_told_whether_it_has_the_device_to_itself() -> None:
    gate = Gate()
    model = LetterModel()
    async with engine_on(model, workers=3) as engine:
        await engine.embed("alone")
        await engine.embed("alone again")
        assert model.at_once == [1, 1]
        model.on_forward = gate
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.embed, "first")
            await gate.arrived()
            tasks.start_soon(engine.embed, "beside it")
            await until(lambda: len(model.at_once) == 4)
            gate.open()
    assert model.at_once[2:] == [1, 3]


async def test_a_request_is_shared_by_the_free_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "MIN_SHARE_TOKENS", 4)
    both = threading.Barrier(2, timeout=30)

    def meet(_: Sequence[str]) -> None:
        both.wait()

    model = LetterModel(on_forward=meet)
    async with engine_on(model) as engine:
        result = await engine.embed(["aa", "bb", "cc", "dd"])
        assert engine.statistics().device.batches == {"share": 1, "demand": 1}
    assert_array_equal(result.embeddings, [expected(text) for text in ("aa", "bb", "cc", "dd")])
    assert sorted(model.forwarded) == [["aa", "bb"], ["cc", "dd"]]
    assert model.at_once == [2, 2]


async def test_many_requests_at_once_are_never_mixed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "MIN_SHARE_TOKENS", 4)
    results: dict[int, Any] = {}

    async def ask(engine: Engine, i: int) -> None:
        results[i] = await engine.embed([f"{i}." * (j + 1) for j in range(i % 5 + 1)])

    async with engine_on(LetterModel(), workers=3, max_batch_tokens=64) as engine:
        async with anyio.create_task_group() as tasks:
            for i in range(60):
                tasks.start_soon(ask, engine, i)
    for i in range(60):
        assert_array_equal(results[i].embeddings, [expected(f"{i}." * (j + 1)) for j in range(i % 5 + 1)])


async def test_a_bad_item_fails_alone_while_another_batch_runs() -> None:
    gate = Gate()

    def deed(texts: Sequence[str]) -> None:
        if "held" in texts:
            gate()
        if "poison" in texts:
            raise ValueError("poison")

    async with engine_on(LetterModel(on_forward=deed)) as engine, anyio.create_task_group() as tasks:
        tasks.start_soon(engine.embed, "held")
        await gate.arrived()
        with pytest.raises(ModelFailed):
            await engine.embed(["fine", "poison", "fine too"])
        await engine.embed("next")
        gate.open()


async def test_out_of_memory_lowers_what_all_workers_plan() -> None:
    def deed(texts: Sequence[str]) -> None:
        if len(texts) > 2:
            raise OutOfMemory("no room")

    model = LetterModel(on_forward=deed)
    async with engine_on(model) as engine:
        result = await engine.embed(["a", "b", "c", "d", "e", "f", "g", "h"])
        assert_array_equal(result.embeddings, [expected(text) for text in "abcdefgh"])
        model.forwarded.clear()
        await engine.embed(list("abcdefghijklmnopqrst"))
    assert max(map(len, model.forwarded)) <= 2


async def test_a_drain_waits_for_both_forwards() -> None:
    gate = Gate()
    model = LetterModel(on_forward=gate)
    answered: list[str] = []

    async with anyio.create_task_group() as tasks, engine_on(model) as engine:

        async def ask(text: str) -> None:
            await engine.embed(text)
            answered.append(text)

        tasks.start_soon(ask, "a")
        await gate.arrived()
        tasks.start_soon(ask, "b")
        await until(lambda: len(model.forwarded) == 2)
        tasks.start_soon(engine.drain, 30)
        await anyio.lowlevel.checkpoint()
        gate.open()
        await until(lambda: len(answered) == 2)


async def test_a_stop_fails_the_requests_at_once_and_waits_for_both_forwards() -> None:
    gate = Gate()
    model = LetterModel(on_forward=gate)
    failed: list[str] = []

    async def ask(engine: Engine, text: str) -> None:
        with pytest.raises(EngineStopped):
            await engine.embed(text)
        failed.append(text)
        if len(failed) == 2:
            gate.open()

    async def stop(tasks: TaskGroup) -> None:
        async with engine_on(model) as engine:
            tasks.start_soon(ask, engine, "a")
            await gate.arrived()
            tasks.start_soon(ask, engine, "b")
            await until(lambda: len(model.forwarded) == 2)
            raise ZeroDivisionError

    async with anyio.create_task_group() as tasks:
        with pytest.raises(ZeroDivisionError):
            await stop(tasks)
        assert sorted(failed) == ["a", "b"]


async def test_a_caller_who_leaves_a_running_forward_is_not_waited_for() -> None:
    gate = Gate()
    model = LetterModel(on_forward=gate)
    async with engine_on(model) as engine, anyio.create_task_group() as tasks:
        tasks.start_soon(engine.embed, "stays")
        await gate.arrived()
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as leaving:
                leaving.start_soon(engine.embed, "leaves")
                await until(lambda: len(model.forwarded) == 2)
                scope.cancel()
        assert engine.statistics().admission.requests == 1
        gate.open()
        await until(lambda: engine.statistics().device.wasted_tokens == len("leaves"))


async def test_a_device_that_is_lost_in_one_forward_breaks_the_engine_for_both() -> None:
    gate = Gate()

    def deed(texts: Sequence[str]) -> None:
        if "lose" in texts:
            raise DeviceLost("the device is lost")
        gate()

    async with engine_on(LetterModel(on_forward=deed)) as engine, anyio.create_task_group() as tasks:

        async def ask() -> None:
            with pytest.raises((EngineStopped, DeviceLost)):
                await engine.embed("runs")

        tasks.start_soon(ask)
        await gate.arrived()
        with pytest.raises((EngineStopped, DeviceLost)):
            await engine.embed("lose")
        assert "lost" in await engine.wait_broken()
        gate.open()
        await until(lambda: engine._pipeline.batch["text"].running == 0)


def test_the_number_of_forward_workers_has_a_range() -> None:
    with pytest.raises(ConfigError, match="forward_workers"):
        EngineConfig(forward_workers=0)


async def test_what_is_less_than_the_small_batch_that_runs_gathers_until_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lanes, "MIN_SHARE_TOKENS", 10)
    gate = Gate()
    model = LetterModel(on_forward=gate)
    async with engine_on(model, cores=4) as engine, anyio.create_task_group() as tasks:
        tasks.start_soon(engine.embed, "first")
        await until(lambda: len(model.forwarded) == 1)
        for text in ("a", "bc"):
            tasks.start_soon(engine.embed, text)
        await until(lambda: engine._pipeline.batch["text"].waiting == 2)
        assert busy(engine) == (1, 2)
        gate.open()
    assert model.forwarded == [["first"], ["a", "bc"]]


async def test_as_much_as_the_small_batch_that_runs_runs_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "MIN_SHARE_TOKENS", 10)
    gate = Gate()
    model = LetterModel(on_forward=gate)
    async with engine_on(model, cores=4) as engine, anyio.create_task_group() as tasks:
        tasks.start_soon(engine.embed, "first")
        await until(lambda: len(model.forwarded) == 1)
        tasks.start_soon(engine.embed, "abc")
        await until(lambda: engine._pipeline.batch["text"].waiting == 1)
        tasks.start_soon(engine.embed, "de")
        await until(lambda: len(model.forwarded) == 2)
        assert busy(engine) == (2, 2)
        gate.open()
    assert model.forwarded == [["first"], ["de", "abc"]]


async def test_what_has_a_device_of_its_own_gathers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "MIN_SHARE_TOKENS", 10)
    gate = Gate()
    model = LetterModel(on_forward=gate)
    async with engine_on(model, cores=None) as engine, anyio.create_task_group() as tasks:
        tasks.start_soon(engine.embed, "first")
        await until(lambda: len(model.forwarded) == 1)
        tasks.start_soon(engine.embed, "a")
        await until(lambda: len(model.forwarded) == 2)
        gate.open()
    assert model.forwarded == [["first"], ["a"]]


@pytest.mark.parametrize(("first", "second"), [("small", "a long second text"), ("a long first text", "small")])
async def test_a_share_of_work_and_a_small_batch_do_not_wait_for_each_other(
    first: str, second: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "MIN_SHARE_TOKENS", 10)
    gate = Gate()
    model = LetterModel(on_forward=gate)
    async with engine_on(model, cores=4) as engine, anyio.create_task_group() as tasks:
        tasks.start_soon(engine.embed, first)
        await until(lambda: len(model.forwarded) == 1)
        tasks.start_soon(engine.embed, second)
        await until(lambda: len(model.forwarded) == 2)
        gate.open()


class Preparing:
    """Holds the preparing of some texts until each is released."""

    def __init__(self, *texts: str) -> None:
        self._held = {text: threading.Event() for text in texts}

    def __call__(self, texts: Sequence[str]) -> None:
        for text in texts:
            if text in self._held:
                assert self._held[text].wait(30)

    def release(self, text: str) -> None:
        self._held[text].set()


@asynccontextmanager
async def beside_a_forward_and_preparing(
    model: LetterModel, preparing: Sequence[str], **settings: Any
) -> AsyncIterator[tuple[Engine, TaskGroup, Preparing]]:
    """An engine with two workers, of which one runs a forward of the text "first", while other texts are prepared."""
    gate, model.on_preprocess = Gate(), Preparing(*preparing)
    model.on_forward = gate
    async with engine_on(model, preprocess_limit=2, chunk_items=1, **settings) as engine:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.embed, "first")
            await until(lambda: len(model.forwarded) == 1)
            for text in preparing:
                tasks.start_soon(_embed, engine, text)
            await until(lambda: engine._pipeline.preprocess["text"].calls == len(preparing))
            yield engine, tasks, model.on_preprocess
            gate.open()


async def _embed(engine: Engine, text: str) -> None:
    with suppress(InvalidInput):
        await engine.embed(text)


async def test_with_all_cores_busy_less_than_a_share_waits_for_what_is_prepared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lanes, "MIN_SHARE_TOKENS", 30)
    model = LetterModel()
    async with beside_a_forward_and_preparing(model, ["late"], cores=2) as (engine, tasks, preparing):
        tasks.start_soon(engine.embed, "abcde")  # as much as the forward that runs
        await until(lambda: engine._pipeline.batch["text"].waiting == 1)
        await anyio.wait_all_tasks_blocked()
        assert model.forwarded == [["first"]]
        preparing.release("late")
        await until(lambda: len(model.forwarded) == 2)
    assert model.forwarded[1:] == [["late", "abcde"]]


async def test_it_does_not_wait_for_what_turns_out_to_be_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "MIN_SHARE_TOKENS", 10)
    model = LetterModel()
    async with beside_a_forward_and_preparing(model, [""], cores=2) as (engine, tasks, preparing):
        tasks.start_soon(engine.embed, "abcde")
        await until(lambda: engine._pipeline.batch["text"].waiting == 1)
        await anyio.wait_all_tasks_blocked()
        preparing.release("")
        await until(lambda: len(model.forwarded) == 2)
    assert model.forwarded[1:] == [["abcde"]]


async def test_it_waits_for_inputs_that_no_thread_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "MIN_SHARE_TOKENS", 40)
    model = LetterModel()
    async with beside_a_forward_and_preparing(model, ["one", "two"], cores=2) as (engine, tasks, preparing):
        tasks.start_soon(engine.embed, "three")
        await until(lambda: engine._pipeline.channels[1].waiting == 1)
        preparing.release("one")
        preparing.release("two")
        await until(lambda: len(model.forwarded) == 2)
    assert sorted(model.forwarded[1]) == ["one", "three", "two"]


async def test_it_waits_for_what_is_on_its_way_from_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "MIN_SHARE_TOKENS", 30)
    monkeypatch.setattr(channel, "IN_A_ROW", 1)  # the slot has its turn between two lists
    received, go_on = anyio.Event(), anyio.Event()

    async def hold(point: str) -> None:
        if point == "batch.received" and model.forwarded and not received.is_set():
            received.set()
            await go_on.wait()

    model = LetterModel()
    async with beside_a_forward_and_preparing(model, ["abcde", "late"], cores=2, options=StageOptions(seam=hold)) as (
        engine,
        _,
        preparing,
    ):
        preparing.release("abcde")
        await received.wait()
        preparing.release("late")
        await until(lambda: engine._pipeline.channels[2].waiting == 1)
        assert engine._pipeline.preprocess["text"].calls == 0
        go_on.set()
        await until(lambda: len(model.forwarded) == 2)
    assert model.forwarded[1:] == [["late", "abcde"]]


@pytest.mark.parametrize(
    ("text", "cores"),
    [
        pytest.param("abcde", 3, id="a core is free"),
        pytest.param("abcde", None, id="a device of its own"),
        pytest.param("abcdefghij", 2, id="a share"),
    ],
)
async def test_nothing_waits_for_what_is_prepared_without_need(
    text: str, cores: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "MIN_SHARE_TOKENS", 10)
    model = LetterModel()
    async with beside_a_forward_and_preparing(model, ["late"], cores=cores) as (engine, tasks, preparing):
        tasks.start_soon(engine.embed, text)
        await until(lambda: len(model.forwarded) == 2)
        preparing.release("late")
    assert model.forwarded[1] == [text]


async def test_an_idle_device_takes_less_than_a_share_together_with_what_is_being_prepared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lanes, "MIN_SHARE_TOKENS", 10)
    monkeypatch.setattr(company, "COMPANY_S", 1000.0)
    model = LetterModel(on_preprocess=(preparing := Preparing("late")))
    async with engine_on(model, cores=2, chunk_items=1) as engine, anyio.create_task_group() as tasks:
        tasks.start_soon(engine.embed, "late")
        await until(lambda: engine._pipeline.preprocess["text"].calls == 1)
        tasks.start_soon(engine.embed, "a")
        await until(lambda: engine._pipeline.batch["text"].waiting == 1)
        await anyio.wait_all_tasks_blocked()
        assert model.forwarded == []
        preparing.release("late")
    assert model.forwarded == [["a", "late"]]


@pytest.mark.parametrize(
    ("text", "cores"),
    [pytest.param("a", None, id="a device of its own"), pytest.param("abcdefghij", 2, id="a share")],
)
async def test_an_idle_device_waits_for_nothing_without_need(
    text: str, cores: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "MIN_SHARE_TOKENS", 10)
    monkeypatch.setattr(company, "COMPANY_S", 1000.0)
    await answered_beside_preparing(text, cores)


async def test_an_idle_device_waits_a_moment_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "MIN_SHARE_TOKENS", 10)
    await answered_beside_preparing("a", cores=2)


async def answered_beside_preparing(text: str, cores: int | None) -> None:
    """Have a text answered while others are being prepared, which does not end before."""
    model = LetterModel(on_preprocess=(preparing := Preparing("late", "later")))
    settings: dict[str, Any] = {"preprocess_limit": 3, "chunk_items": 1}
    async with engine_on(model, cores=cores, **settings) as engine, anyio.create_task_group() as tasks:
        for other in ("late", "later"):
            tasks.start_soon(engine.embed, other)
        await until(lambda: engine._pipeline.preprocess["text"].calls == 2)
        assert_array_equal((await engine.embed(text)).embeddings, [expected(text)])
        for other in ("late", "later"):
            preparing.release(other)


@pytest.mark.parametrize(("cores", "gathers"), [(2, True), (None, False)])
async def test_requests_gather_while_forwards_keep_all_cores_busy(cores: int | None, gathers: bool) -> None:
    gate, held = Gate(), ("x" * 200, "y" * 200)
    model = LetterModel(on_forward=gate)
    async with engine_on(model, cores=cores) as engine, anyio.create_task_group() as tasks:
        gathers_s = engine._pipeline._gathers_s
        assert gathers_s() == 0
        for text in held:
            assert gathers_s() == 0  # a slot is free
            tasks.start_soon(engine.embed, text)
            await until(lambda text=text: [text] in model.forwarded)  # type: ignore[misc]  # it is a string
        assert gathers_s() == (pipeline.GATHER_S if gathers else 0)
        for text in ("a", "b", "c"):
            tasks.start_soon(engine.embed, text)
        await until(lambda: engine._pipeline.batch["text"].waiting == 3)  # they wait for a moment only
        gate.open()
    assert gathers_s() == 0
