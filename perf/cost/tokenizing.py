"""Tokenizing by several threads, as in preprocess, without queues, devices and HTTP.

Each class is made in a process of its own: see `perf.tools.workers`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Literal, TypeAlias

from perf.cost.at_once import Block, per_second
from perf.tools.servers import Options
from perf.tools.texts import TextSource
from staged_pool.runtime.model import ModelInput
from staged_pool.runtime.requests import DENSE_ONLY, MODEL_MAX, TextInput

Length = Literal["short", "long"]

WORDS: Final[dict[Length, int]] = {"short": 16, "long": 400}
"""Words of one text, one token each; a text over the model's limit is truncated."""

CALLERS: Final = 3
"""Callers with long texts, beside a short one."""

_LISTS: Final = 8
_PAUSE_S: Final = 0.01
"""Pause between two short texts, in seconds."""

Tokenize: TypeAlias = Callable[[list[ModelInput]], object]


class Texts:
    """Tokenizing of lists of texts, of the size of a chunk of preprocess.

    Args:
        options: Options with the model.
    """

    def __init__(self, options: Options) -> None:
        self._tokenize, self._lists = _read(options)

    def __call__(self, block: Block[Length]) -> float:
        """Return the texts a second."""
        lists = self._lists[block.what]

        def call(number: int) -> int:
            texts = lists[number % len(lists)]
            self._tokenize(texts)
            return len(texts)

        return per_second(call, block.threads, block.seconds)


class AmongLong:
    """Tokenizing of one text at a time, while other callers repeat lists of long texts.

    Args:
        options: Options with the model.
    """

    def __init__(self, options: Options) -> None:
        self._tokenize, self._lists = _read(options)

    def __call__(self, block: Block[Length]) -> list[float]:
        """Return the latency of each text in ms; it shares the threads with the long texts."""
        taken_ms: list[float] = []
        end = time.perf_counter() + block.seconds
        given, long = self._lists[block.what], self._lists["long"]
        with ThreadPoolExecutor(block.threads) as pool, ThreadPoolExecutor(CALLERS) as callers:

            def send_long_ones(number: int) -> None:
                while time.perf_counter() < end:
                    pool.submit(self._tokenize, long[number % _LISTS]).result()
                    number += CALLERS

            sending = [callers.submit(send_long_ones, number) for number in range(CALLERS)]
            while (sent_at := time.perf_counter()) < end:
                pool.submit(self._tokenize, given[0][:1]).result()
                taken_ms.append((time.perf_counter() - sent_at) * 1e3)
                time.sleep(_PAUSE_S)
            for caller in sending:
                caller.result()
        return taken_ms


def _read(options: Options) -> tuple[Tokenize, Mapping[Length, list[list[ModelInput]]]]:
    """Return the model's preprocess, and lists of texts for it."""
    from staged_pool.runtime.models.load import load_model

    config = options.engine_config()
    model = load_model(config)
    source, rng = TextSource(options.model), random.Random(0)
    special = source.tokens_of("")
    lists = {
        length: [[_given(source.text(words + special, rng)) for _ in range(config.chunk_items)] for _ in range(_LISTS)]
        for length, words in WORDS.items()
    }
    return model.preprocess, lists


def _given(text: str) -> ModelInput:
    return ModelInput(TextInput(text, max_tokens=MODEL_MAX), DENSE_ONLY)
