"""Unit costs of the parts of a server, as `python -m perf scale --measure` has measured them."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from perf.scale.linear import NOTHING, Linear
from perf.tools.report import RESULTS

RESULT = "scale.json"


class NotMeasured(RuntimeError):
    """The unit costs are not measured on this machine yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitCosts:
    """CPU seconds and bytes for each unit of work.

    All are linear. A *request* is one HTTP request with its answer. A batch costs an event loop something of its own:
    it is woken, and hands over or takes what the batch holds.
    """

    one_loop: Linear
    """Event loop of a server of one process: HTTP, all stages."""
    one_preprocess: Linear
    """Threads that tokenize in a server of one process; `batches` are calls."""
    front_loop: Linear
    """Event loop of a front: HTTP, parse, admission, frames, postprocess."""
    front_preprocess: Linear
    """Threads that tokenize in a front; `batches` are calls."""
    engine_loop: Linear
    """Event loop of the engine process: admission, frames, the fair queue, batches, rows."""
    client: Linear
    """The load generator, which shares the machine when the model is checked."""
    cpu_device: Linear
    """Forwards of the measured model on the CPU; `batches` are forwards."""
    up: Linear
    """Bytes from a front to the engine process."""
    down: Linear
    """Bytes from the engine process to a front."""
    request: Linear
    """Bytes of a request over HTTP, head included."""
    answer: Linear
    """Bytes of an answer over HTTP, head included; vectors as base64."""
    front_bytes: float
    """Memory of a front after load: its proportional set size."""
    engine_bytes: float
    """Memory of the engine process after load, weights included."""
    width: int
    """Numbers of a vector of the measured model."""
    cpu_slots: int
    """Forwards at once on the CPU."""

    def wider(self, width: int) -> UnitCosts:
        """Return the costs for a model with longer vectors: only the bytes differ, 4 for each number of a row.

        Base64 writes 4 characters for 3 bytes (RFC 4648). That the loops copy more bytes is left out.
        """
        more = 4.0 * (width - self.width)
        costs: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        costs["width"] = width
        costs["down"] = _with_text(self.down, more)
        costs["answer"] = _with_text(self.answer, more * 4 / 3)
        return UnitCosts(**costs)

    def slower(self, factor: float) -> UnitCosts:
        """Return the costs on a machine whose cores take `factor` times as long."""
        costs: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in ("one_loop", "one_preprocess", "front_loop", "front_preprocess", "engine_loop", "client"):
            costs[name] = costs[name].times(factor)
        return UnitCosts(**costs)


def read_costs(folder: Path = RESULTS) -> UnitCosts:
    """Read the costs that were measured last.

    Raises:
        NotMeasured: There are none.
    """
    path = folder / RESULT
    if not path.exists():
        raise NotMeasured(f"{path} is missing: run `python -m perf scale --measure`")
    return costs_of(json.loads(path.read_text())["results"]["costs"])


def costs_of(values: dict[str, Any]) -> UnitCosts:
    """Return the costs of their JSON."""
    costs: dict[str, Any] = {
        name: Linear(**value) if isinstance(value, dict) else value for name, value in values.items()
    }
    return UnitCosts(**costs)


def _with_text(cost: Linear, more: float) -> Linear:
    return Linear(cost.requests, cost.texts + more, cost.tokens, cost.batches)


def no_costs() -> UnitCosts:
    """Return costs of nothing at all, to begin with."""
    costs: dict[str, Any] = {field.name: NOTHING for field in fields(UnitCosts)}
    return UnitCosts(**costs | {"front_bytes": 0.0, "engine_bytes": 0.0, "width": 0, "cpu_slots": 1})
