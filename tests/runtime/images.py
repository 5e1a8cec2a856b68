"""Engines on the double of texts and images, and requests to them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.engine.run import run_engine
from staged_pool.runtime.media.image_completer import ImageCompleter
from staged_pool.runtime.requests import EmbedRequest, Image, TextInput
from staged_pool.runtime.results import EmbedResult
from staged_pool.runtime.threads.device import DeviceThreads
from tests.support.model import LetterModel
from tests.support.waiting import until


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
    completer = engine._stages.parse._completer
    assert isinstance(completer, ImageCompleter)
    return completer
