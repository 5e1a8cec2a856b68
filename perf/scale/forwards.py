"""CPU time of forwards, with as many of them at once as a server runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from perf.tools.servers import Options
from staged_pool.runtime.model import ModelInput
from staged_pool.runtime.payloads import Payload
from staged_pool.runtime.requests import DENSE_ONLY, TextInput
from staged_pool.stages.work import Prepared


@dataclass(frozen=True, slots=True)
class Batches:
    """Equal forwards to be measured."""

    texts: Sequence[str]
    seconds: float


class Forwards:
    """A model, whose forwards run in threads, as on the device threads of a server.

    Args:
        options: Options of the model.
    """

    def __init__(self, options: Options) -> None:
        from staged_pool.runtime.models.load import load_model

        self._model = load_model(options.engine_config())

    def __call__(self, batches: Batches | None) -> float:
        """Return the CPU seconds of one forward; without batches, the number of forwards at once."""
        slots = self._model.card.forward_workers
        if batches is None:
            return slots
        inputs = [ModelInput(TextInput(text), DENSE_ONLY) for text in batches.texts]
        payloads = [one.payload for one in self._model.preprocess(inputs) if isinstance(one, Prepared)]
        self._run(payloads, slots, batches.seconds / 4)  # a warm-up
        before_s = time.process_time()
        done = self._run(payloads, slots, batches.seconds)
        return (time.process_time() - before_s) / done

    def _run(self, payloads: Sequence[Payload], slots: int, seconds: float) -> int:
        """Run forwards for some seconds; return their number."""
        done = [0] * slots
        end = time.perf_counter() + seconds

        def loop(place: int) -> None:
            while not done[place] or time.perf_counter() < end:  # one at least: a busy machine starts threads late
                self._model.forward(payloads, slots)
                done[place] += 1

        threads = [threading.Thread(target=loop, args=(place,)) for place in range(slots)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(done)
