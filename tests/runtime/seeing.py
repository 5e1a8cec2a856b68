"""A model of both lanes whose answers are known, and requests for it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import anyio
import numpy as np

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.engine.run import run_engine
from staged_pool.runtime.media.image_completer import ImageCompleter
from staged_pool.runtime.model import ModelCard, ModelInput, Payload, Pixels, PreparedImage, Row, TokenSequence
from staged_pool.runtime.requests import EmbedRequest, Image, TextInput
from staged_pool.runtime.results import EmbedResult
from staged_pool.runtime.threads.device import DeviceThreads
from staged_pool.stages.errors import InvalidInput, ModelFailed
from staged_pool.stages.work import Prepared
from tests.doubles import CARD, LetterModel, until


@dataclass
class SeeingModel(LetterModel):
    """A model that reads an image as the letters of its bytes. Hooks are told of images as of texts."""

    card: ModelCard = field(default_factory=lambda: replace(CARD, lanes=("text", "image")))

    def preprocess(self, inputs: Sequence[ModelInput]) -> Sequence[Prepared[Payload] | InvalidInput]:
        if inputs[0].lane == "text":
            return super().preprocess(inputs)
        letters = [b"".join(cast(bytes, image.source) for image in given.images).decode() for given in inputs]
        self.preprocessed.append(letters)
        self.on_preprocess(letters)
        return [
            Prepared(
                PreparedImage(Pixels(np.array([ord(c) for c in text], dtype=np.uint8)), given.outputs, len(text)),
                len(text),
                "image",
            )
            for given, text in zip(inputs, letters, strict=True)
        ]

    def forward(self, payloads: Sequence[Payload], at_once: int = 1, /) -> list[Row | ModelFailed]:
        sequences = [
            TokenSequence(payload.pixels.values.tolist(), payload.outputs)
            if isinstance(payload, PreparedImage)
            else payload
            for payload in payloads
        ]
        return super().forward(sequences, at_once)


@asynccontextmanager
async def engine_on(
    model: LetterModel, *, fetch: Any = None, options: Any = None, shared_cores: int | None = None, **settings: Any
) -> AsyncIterator[Engine]:
    config = EngineConfig(**settings)
    others = {} if fetch is None else {"fetch": fetch}
    async with (
        DeviceThreads("test device", watchdog_s=config.watchdog_s).running() as device,
        DeviceThreads("test image device", watchdog_s=config.watchdog_s).running() as image_device,
        run_engine(
            config,
            model,
            device=device,
            image_device=image_device,
            options=options,
            shared_cores=shared_cores,
            **others,
        ) as engine,
    ):
        image_device.grow(model.card.forward_workers)
        yield engine
        admission = engine.statistics().admission
        assert (admission.requests, admission.items, admission.tokens) == (0, 0, 0)
        await until(lambda: completer(engine).fetching == 0)


async def ask(engine: Engine, *inputs: str | Image, timeout_s: float = float("inf")) -> EmbedResult:
    """Embed texts and images."""
    request = EmbedRequest(inputs=tuple(TextInput(one) if isinstance(one, str) else one for one in inputs))
    result: EmbedResult = await engine.submit(lambda: request, lambda result: result, timeout_s=timeout_s)
    return result


def image(letters: str) -> Image:
    """One that is at hand."""
    return Image(letters.encode())


def at(url: str) -> Image:
    """One that is to be fetched."""
    return Image(f"http://{url}")


class Host:
    """A host of images: the test decides when each comes, if at all."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.left: list[str] = []
        """Fetches that were cancelled."""
        self._answers: dict[str, Callable[[], Image]] = {}
        self._more = anyio.Event()

    def answer(self, url: str, answer: Callable[[], Image]) -> None:
        self._answers[url] = answer
        self._more.set()
        self._more = anyio.Event()

    async def __call__(self, image: Image, /) -> Image:
        url = str(image.source).removeprefix("http://")
        self.asked.append(url)
        try:
            while url not in self._answers:
                await self._more.wait()
        except anyio.get_cancelled_exc_class():
            self.left.append(url)
            raise
        return self._answers[url]()


def waiting_to_be_fed(engine: Engine) -> int:
    """Requests with inputs that wait in front of preprocess."""
    return engine.statistics().priorities["interactive"].waiting_requests


def completer(engine: Engine) -> ImageCompleter:
    """Return the image fetcher of an engine."""
    completer = engine._pipeline.parse._completer
    assert isinstance(completer, ImageCompleter)
    return completer
