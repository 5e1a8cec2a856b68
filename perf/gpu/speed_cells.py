"""Loads and figures of `python -m perf.gpu speed`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final

from perf.tools import report
from perf.tools.report import number

if TYPE_CHECKING:
    from perf.gpu.hosted import Rate

COLUMNS: Final = (
    "load", "inputs/s", "tokens/s", "of bare", "idle", "utilized", "tokens a batch", "p50 ms", "p99 ms"
)  # fmt: skip
NOTE: Final = (
    "of bare: tokens/s over those of bare forwards of the same inputs; idle: time between forwards, by events on the "
    "device; utilized: time with a kernel on the device, by its driver"
)


@dataclass(frozen=True, slots=True)
class Load:
    """One closed loop over HTTP."""

    name: str
    clients: int
    bare: str = ""
    """Name of the bare forwards that it is compared with. Empty: it is compared with none."""
    judged: bool = False
    """Held to `KEPT` and `IDLE`."""
    without: str = ""
    """Name of the part that is turned off. Empty: none is."""


TEXT_LOADS: Final = (
    Load("s1", 1),
    Load("s1", 64),
    Load("m8", 16, "m8"),
    Load("m8", 64, "m8", judged=True),
    Load("x64", 16, "x64"),
    Load("x64", 64, "x64", judged=True),
    Load("documents", 4, "x64"),
)
IMAGE_LOADS: Final = (Load("image", 1), Load("image", 16, "16 images", judged=True), Load("image", 64, "64 images"))


@dataclass(frozen=True, slots=True)
class Cell:
    """One measured rate of one model."""

    model: str
    load: str
    clients: int
    rate: Rate
    of_bare: float | None

    def row(self) -> list[str]:
        """Return the cells of a row with `COLUMNS`."""
        rate, use = self.rate, self.rate.use
        summary = report.Summary.of(rate.latencies_ms)
        return [
            self.load,
            number(rate.inputs_per_s),
            number(rate.tokens_per_s),
            *("-" if share is None else f"{share:.2f}" for share in (self.of_bare, use.idle, use.utilization)),
            number(rate.batch_tokens),
            *report.Summary.cells(summary)[:2],
        ]

    def result(self) -> dict[str, object]:
        """Return the figures for the JSON file."""
        rate = self.rate
        return {
            "model": self.model, "load": self.load, "clients": self.clients, "inputs_per_s": rate.inputs_per_s,
            "tokens_per_s": rate.tokens_per_s, "of_bare": self.of_bare, "use": asdict(rate.use),
            "batch_tokens": rate.batch_tokens, "ms": report.Summary.of(rate.latencies_ms),
        }  # fmt: skip
