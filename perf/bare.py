"""What the machine does without a server: the same model, its tokenizer and its decoder, in the best plain loop."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from perf.servers import Options
from staged_pool.runtime.model import ModelInput
from staged_pool.runtime.requests import DENSE_ONLY, Image, TextInput

Groups = Sequence[Sequence[str]] | Sequence[Sequence[bytes]]
"""Texts, or encoded images, as they would come in requests."""


@dataclass(frozen=True, slots=True)
class BareLoad:
    """What is to be done."""

    groups: Groups
    """Again and again. As many as share a forward, at least."""
    seconds: float
    at_once: int = 1
    """How many groups share a forward."""


@dataclass(frozen=True, slots=True)
class Rate:
    """What was done."""

    groups: int
    elapsed_s: float


class BareLoop:
    """Prepares and computes, without queues, stages and HTTP.

    Tried in two ways, of which the better one counts: a thread for each core that does all of it on that core, and one
    thread whose forwards have all cores.
    """

    def __init__(self, options: Options) -> None:
        from staged_pool.runtime.models.load import load_model

        self._model = load_model(options.engine_config())
        self._cores: Final = len(os.sched_getaffinity(0))

    def __call__(self, load: BareLoad) -> Rate:
        """Do it, half of the time in each way."""
        groups, at_once = load.groups, load.at_once
        batches = [
            [given(source) for group in groups[first : first + at_once] for source in group]
            for first in range(0, len(groups) - at_once + 1, at_once)
        ]
        self.batch(batches[0], 1)
        ways = [self._run(batches, threads, load.seconds / 2) for threads in sorted({1, self._cores})]
        best = max(ways, key=lambda rate: rate.groups / rate.elapsed_s)
        return Rate(best.groups * at_once, best.elapsed_s)

    def batch(self, inputs: Sequence[ModelInput], at_once: int) -> tuple[float, float]:
        """Do one; the seconds of preparing and of computing it.

        Args:
            inputs: Of the batch.
            at_once: Batches that are computed at the same time.
        """
        from staged_pool.stages.work import Prepared

        began = time.perf_counter()
        prepared = self._model.preprocess(inputs)
        payloads = [one.payload for one in prepared if isinstance(one, Prepared)]
        if len(payloads) < len(inputs):
            raise TypeError("an input of the measurement cannot be read")
        middle = time.perf_counter()
        self._model.forward(payloads, at_once)
        return middle - began, time.perf_counter() - middle

    def _run(self, batches: Sequence[Sequence[ModelInput]], threads: int, seconds: float) -> Rate:
        done = [0] * threads
        started = time.perf_counter()

        def loop(place: int) -> None:
            turn = place
            while time.perf_counter() - started < seconds:
                self.batch(batches[turn % len(batches)], threads)
                done[place] += 1
                turn += threads

        workers = [threading.Thread(target=loop, args=(place,)) for place in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return Rate(sum(done), time.perf_counter() - started)


def given(source: str | bytes) -> ModelInput:
    """A text or an encoded image, as the model gets it."""
    return ModelInput(Image(source) if isinstance(source, bytes) else TextInput(source), DENSE_ONLY)
