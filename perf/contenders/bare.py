"""Throughput without a server: the same model, tokenizer and image decoder in a plain loop."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from perf.tools.servers import Options
from staged_pool.runtime.model import ModelInput
from staged_pool.runtime.requests import DENSE_ONLY, Image, TextInput

Groups = Sequence[Sequence[str]] | Sequence[Sequence[bytes]]
"""Texts or encoded images, grouped as in requests."""


@dataclass(frozen=True, slots=True)
class BareLoad:
    """Work of the plain loop."""

    groups: Groups
    """Groups that are repeated; at least `at_once`."""
    seconds: float
    at_once: int = 1
    """Number of groups in one forward."""


@dataclass(frozen=True, slots=True)
class Rate:
    """Number of groups done, and the time in seconds."""

    groups: int
    elapsed_s: float


class BareLoop:
    """Preprocess and forward in a loop, without queues, stages and HTTP.

    It is run in two ways, and the faster one counts: one thread for each core, and one thread whose forwards use all
    cores.
    """

    def __init__(self, options: Options) -> None:
        from staged_pool.runtime.models.load import load_model

        self._model = load_model(options.engine_config())
        self._cores: Final = len(os.sched_getaffinity(0))

    def __call__(self, load: BareLoad) -> Rate:
        """Run the load, half of the time in each way."""
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
        """Run one batch; return the seconds of its preprocess and of its forward.

        Args:
            inputs: Inputs of the batch.
            at_once: Number of forwards that run at the same time.
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
            index = place
            while time.perf_counter() - started < seconds:
                self.batch(batches[index % len(batches)], threads)
                done[place] += 1
                index += threads

        workers = [threading.Thread(target=loop, args=(place,)) for place in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return Rate(sum(done), time.perf_counter() - started)


def given(source: str | bytes) -> ModelInput:
    """Return a text or an encoded image as a model input."""
    return ModelInput(Image(source) if isinstance(source, bytes) else TextInput(source), DENSE_ONLY)
