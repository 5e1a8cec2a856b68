"""Pauses of the garbage collector, which stop every thread of Python code."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from staged_pool.stages.meter import Histogram, HistogramSnapshot


class GcPauses:
    """Histograms of the seconds of collections, by generation."""

    def __init__(self) -> None:
        self._began = 0.0
        self._pauses = {str(generation): Histogram() for generation in range(3)}

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Measure the collections of this process while the block runs."""
        gc.callbacks.append(self._note)
        try:
            yield
        finally:
            gc.callbacks.remove(self._note)

    def _note(self, phase: str, facts: dict[str, Any]) -> None:
        """Note the begin or the end of a collection. The interpreter calls it in the thread that collects."""
        if phase == "start":
            self._began = time.perf_counter()
        elif self._began:
            self._pauses[str(facts["generation"])].observe(time.perf_counter() - self._began)

    def snapshot(self) -> Mapping[str, HistogramSnapshot]:
        """Return the pauses so far, in seconds, by generation."""
        return {generation: pauses.snapshot() for generation, pauses in self._pauses.items()}
