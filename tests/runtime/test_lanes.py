"""Texts and images in one engine: neither waits for what holds up the other."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import anyio
import pytest
from numpy.testing import assert_array_equal

from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.engine.engine_stages import PARSE_WORKERS
from staged_pool.stages import batch
from staged_pool.stages.errors import EngineStopped, InvalidInput, StageFailed, Unsupported
from staged_pool.stages.stage import StageOptions
from staged_pool.stages.supervise import RestartPolicy
from tests.runtime.images import ask, engine_on, image, waiting_to_be_fed
from tests.support.cards import BOTH_LANES, CARD
from tests.support.channels import acting_channels
from tests.support.gates import Gate
from tests.support.model import LetterModel, expected
from tests.support.stages import batch_stages
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

IMAGES = ("preprocess_images", "batch_images")


class ImageGate(Gate):
    """Holds images only: those whose letters are large."""

    def __call__(self, texts: object = None) -> None:
        if isinstance(texts, list) and any(text.isupper() for text in texts):
            super().__call__(texts)


async def test_texts_and_images_of_a_request_are_answered_in_their_order() -> None:
    async with engine_on(LetterModel(BOTH_LANES), chunk_items=2) as engine:
        result = await ask(engine, "a", image("B"), "c", image("D"), image("E"), "f")
    assert_array_equal(result.embeddings, [expected(letter) for letter in "aBcDEf"])
    assert result.usage.prompt_tokens == 6


async def test_a_model_of_one_lane_has_four_stages() -> None:
    async with engine_on(LetterModel()) as engine:
        assert [stage.name for stage in engine.statistics().stages] == ["parse", "preprocess", "batch", "postprocess"]
    images = LetterModel(replace(CARD, lanes=("image",)))
    async with engine_on(images) as engine:
        assert [stage.name for stage in engine.statistics().stages] == ["parse", *IMAGES, "postprocess"]
        assert_array_equal((await ask(engine, image("A"))).embeddings, [expected("A")])
        with pytest.raises(Unsupported, match="no texts"):
            await ask(engine, "a")


async def test_a_text_overtakes_images_that_hold_every_thread_of_preprocess() -> None:
    """More requests of images than parse has workers: none of them may wait there."""
    gate = ImageGate()
    model = LetterModel(BOTH_LANES, on_preprocess=gate)
    async with engine_on(model, image_preprocess_limit=2) as engine, anyio.create_task_group() as tasks:
        for _ in range(PARSE_WORKERS + 40):
            tasks.start_soon(ask, engine, image("A"), image("B"))
        await gate.arrived()
        await until(lambda: engine.statistics().stages[0].done == PARSE_WORKERS + 40)
        assert engine.statistics().stages[0].busy == 0
        assert_array_equal((await ask(engine, "text")).embeddings, [expected("text")])
        gate.open()


async def test_a_text_overtakes_images_that_hold_the_device() -> None:
    gate = ImageGate()
    model = LetterModel(BOTH_LANES, on_forward=gate)
    async with engine_on(model) as engine, anyio.create_task_group() as tasks:
        for _ in range(20):
            tasks.start_soon(ask, engine, image("A"))
        await gate.arrived()
        assert_array_equal((await ask(engine, "text")).embeddings, [expected("text")])
        gate.open()


@pytest.mark.parametrize("shared_cores", [2, None])
async def test_a_text_beside_images_does_not_have_the_cores_to_itself(shared_cores: int | None) -> None:
    """This holds where forwards and preprocess share the cores."""
    preparing, computing = ImageGate(), ImageGate()
    model = LetterModel(BOTH_LANES, on_preprocess=preparing, on_forward=computing)
    model.card = replace(model.card, forward_workers=2)
    async with engine_on(model, shared_cores=shared_cores) as engine, anyio.create_task_group() as tasks:
        await ask(engine, "alone")
        tasks.start_soon(ask, engine, image("A"))
        await preparing.arrived()
        await ask(engine, "beside an image that is prepared")
        preparing.open()
        await computing.arrived()
        await ask(engine, "beside one that is looked at")
        computing.open()
    beside = 2 if shared_cores else 1
    assert model.at_once == [1, beside, 1, beside]


class GateOf(Gate):
    """Holds the images of one letter."""

    def __init__(self, letter: str) -> None:
        super().__init__()
        self._letter = letter

    def __call__(self, texts: object = None) -> None:
        if texts == [self._letter]:
            super().__call__(texts)


@asynccontextmanager
async def preparing_on_the_only_core(model: LetterModel, gate: Gate) -> AsyncIterator[Engine]:
    """An engine that prepares the image B on the only core, until the gate opens."""
    async with engine_on(model, shared_cores=1, image_preprocess_limit=2) as engine:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, engine, image("B"))
            await gate.arrived()
            yield engine
            gate.open()


async def test_images_wait_for_those_that_are_prepared_on_the_last_core() -> None:
    gate = GateOf("B")
    model = LetterModel(BOTH_LANES, on_preprocess=gate)
    async with preparing_on_the_only_core(model, gate) as engine, anyio.create_task_group() as tasks:
        tasks.start_soon(ask, engine, image("A"))
        await until(lambda: engine.statistics().device.holds.get("cores", 0) > 0)
        gate.open()
    assert [sorted(texts) for texts in model.forwarded] == [["A", "B"]]


async def test_images_wait_for_no_call_that_hangs_on_the_last_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "CORE_TIMEOUT_S", 0.001)
    gate = GateOf("B")
    async with preparing_on_the_only_core(LetterModel(BOTH_LANES, on_preprocess=gate), gate) as engine:
        assert_array_equal((await ask(engine, image("A"))).embeddings, [expected("A")])


async def test_each_image_is_a_call_of_its_own_and_images_share_a_forward() -> None:
    gate = ImageGate()
    model = LetterModel(BOTH_LANES, on_forward=gate)
    async with engine_on(model, image_preprocess_limit=1) as engine, anyio.create_task_group() as tasks:
        tasks.start_soon(ask, engine, image("A"))
        await gate.arrived()
        tasks.start_soon(ask, engine, image("B"), image("C"))
        await until(lambda: batch_stages(engine)["image"].waiting == 2)
        gate.open()
    assert model.preprocessed == [["A"], ["B"], ["C"]]
    assert [sorted(texts) for texts in model.forwarded] == [["A"], ["B", "C"]]


async def test_a_request_of_many_images_does_not_hold_up_one_of_a_single_one() -> None:
    gate = ImageGate()
    model = LetterModel(BOTH_LANES, on_preprocess=gate)
    async with engine_on(model, image_preprocess_limit=1, channel_capacity=1) as engine:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, engine, *[image("M")] * 50)
            await gate.arrived()
            tasks.start_soon(ask, engine, image("S"))
            await until(lambda: waiting_to_be_fed(engine) == 2)  # and one image is in the channel
            gate.open()
    assert model.preprocessed.index(["S"]) <= 4


async def test_images_that_wait_for_the_device_are_bounded() -> None:
    gate = Gate()
    model = LetterModel(BOTH_LANES)
    async with engine_on(model, max_batch_tokens=2) as engine, anyio.create_task_group() as tasks:
        await ask(engine, image("AB"))  # the engine learns the tokens of an image
        model.on_forward = gate
        tasks.start_soon(ask, engine, *[image(one + other) for one in "ABCDEFGH" for other in "ABCDEFGH"])
        await gate.arrived()
        await until(lambda: batch_stages(engine)["image"].waiting > 0)
        for _ in range(200):
            await anyio.lowlevel.checkpoint()
        assert len(model.preprocessed) < 20
        gate.open()


@pytest.mark.parametrize("place", ["preprocess", "device"])
async def test_a_caller_who_leaves_frees_its_room_and_nothing_further_of_it_begins(place: str) -> None:
    gate = ImageGate()
    model = (
        LetterModel(BOTH_LANES, on_preprocess=gate)
        if place == "preprocess"
        else LetterModel(BOTH_LANES, on_forward=gate)
    )
    async with engine_on(model, image_preprocess_limit=1, max_batch_items=1) as engine:
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as callers:
                callers.start_soon(ask, engine, *map(image, "ABCDEFGHIJ"))
                await gate.arrived()
                scope.cancel()
        assert engine.statistics().admission.requests == 0
        begun = len(model.preprocessed), len(model.forwarded)
        gate.open()
        await ask(engine, image("Z"))
        assert len(model.forwarded) == begun[1] + 1
        if place == "preprocess":
            assert model.preprocessed == [["A"], ["Z"]]


async def test_a_worker_that_crashes_in_one_lane_is_restarted_and_the_other_never_hears_of_it() -> None:
    crashes = iter([True])

    async def crash(point: str) -> None:
        if point == "take preprocess_images" and next(crashes, False):
            raise RuntimeError("a bug")

    options = StageOptions(restarts=RestartPolicy(first_delay_s=0.0), channel=acting_channels(crash))
    async with engine_on(LetterModel(BOTH_LANES), options=options) as engine:
        with pytest.raises(StageFailed, match="preprocess_images"):
            await ask(engine, image("A"), "a")
        assert_array_equal((await ask(engine, image("B"), "b")).embeddings, [expected("B"), expected("b")])
        crashed = {stage.name: stage.crashes for stage in engine.statistics().stages}
    assert crashed == {
        "parse": 0,
        "preprocess": 0,
        "preprocess_images": 1,
        "batch": 0,
        "batch_images": 0,
        "postprocess": 0,
    }


async def test_images_that_hang_cost_images_and_not_texts() -> None:
    gate = ImageGate()
    model = LetterModel(BOTH_LANES, on_preprocess=gate)
    async with engine_on(model, image_preprocess_limit=1, preprocess_alarm_s=0.02) as engine:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, engine, image("A"))
            await gate.arrived()
            await until(lambda: engine.statistics().overdue_preprocess_calls == 1)
            with pytest.raises(EngineStopped, match="every preprocess_images thread"):
                await ask(engine, image("B"))
            with pytest.raises(EngineStopped, match="every preprocess_images thread"):
                await ask(engine, "mixed", image("B"))
            assert engine.fault is None
            await ask(engine, "text")
            gate.open()
        await ask(engine, image("C"))


async def test_a_bad_image_fails_its_request_and_names_its_place() -> None:
    def read(file: bytes) -> str:
        if file == b"X":
            raise InvalidInput("Not an image.", param="input")
        return file.decode()

    async with engine_on(LetterModel(BOTH_LANES, read_image=read)) as engine:
        with pytest.raises(InvalidInput, match="Not an image") as caught:
            await ask(engine, "a", image("B"), image("X"))
    assert caught.value.index == 2


async def test_a_drain_waits_for_both_lanes() -> None:
    gate = ImageGate()
    answered: list[str] = []
    async with anyio.create_task_group() as tasks:

        async def keep(engine: Engine) -> None:
            await ask(engine, *map(image, "ABCDEF"), "text")
            answered.append("images")

        async with engine_on(LetterModel(BOTH_LANES, on_preprocess=gate), image_preprocess_limit=1) as engine:
            tasks.start_soon(keep, engine)
            await gate.arrived()
            tasks.start_soon(engine.drain, 30)
            await until(lambda: engine.phase == "draining")
            with pytest.raises(EngineStopped):
                await ask(engine, "too late")
            gate.open()
            await until(lambda: answered == ["images"])
