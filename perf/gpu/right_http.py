"""Checks of a served model: each client gets its own answer, while others leave."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch

from perf.gpu.findings import Finding
from perf.gpu.inputs import texts_of
from perf.gpu.models import bert_folder
from perf.gpu.reference import reference_vectors
from perf.gpu.traffic import asks, judge, send
from perf.tools.servers import Options, Server, serving
from staged_pool.runtime.models.kernels.self_check import TOLERANCE

_NAME: Final = "served"
_SEED: Final = 3

_GAUGES: Final = (
    "staged_pool_admission_inside", "staged_pool_stage_waiting_items", "staged_pool_stage_busy_workers",
)  # fmt: skip
"""Gauges that are 0 while the server has no work."""
_IDLE_WITHIN_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Volume:
    """Amount of work of the checks over HTTP."""

    requests: int
    clients: int
    texts: int
    """Number of different texts."""
    most_words: int
    """Words of the longest text."""


def check_traffic(folder: Path, device: str, model: str | None, volume: Volume) -> Iterator[Finding]:
    """Serve a model to many clients, and compare every answer with the reference.

    A tenth of the clients leave before theirs.

    Args:
        folder: Folder for the model.
        device: Device of the server.
        model: The model. None: one of MiniLM's shape.
        volume: Amount of work.
    """
    if model is None:
        shape = {"layers": 6, "width": 384, "heads": 12, "inner": 1536}  # that of MiniLM
        model = str(bert_folder(folder / "served", **shape, device="cpu", dtype="float32", tokenizer=None))
    draw = np.random.default_rng(_SEED)
    lengths = [int(words) for words in draw.integers(1, volume.most_words, size=volume.texts)]
    texts = list(dict.fromkeys(texts_of(lengths)))
    wanted = reference_vectors(model, texts)
    with serving(Options(model=model, device=device).serve_command()) as server:
        dtype = server.card().dtype
        sent = send(server.port, texts, asks(volume.requests, len(texts)), volume.clients)
        yield from judge(_NAME, dtype, sent.outcomes, wanted, TOLERANCE[getattr(torch, dtype)])
        yield from idle(_NAME, dtype, server)


def idle(name: str, way: str, server: Server) -> Iterator[Finding]:
    """Check that a server without clients holds no work, and answers `/health`."""
    until = time.perf_counter() + _IDLE_WITHIN_S
    while any((left := {gauge: server.total(gauge) for gauge in _GAUGES}).values()) and time.perf_counter() < until:
        time.sleep(0.05)
    note = ", ".join(f"{gauge} {value:g}" for gauge, value in left.items() if value)
    yield Finding(name, way, "no work is left", right=not note, note=note)
    server.wait_ok("/health")
    yield Finding(name, way, "/health answers", right=True)
