"""Devices: seconds of a forward, from rates measured on a GPU, from FLOPs, or from this machine's CPU."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from perf.scale.costs import UnitCosts
from perf.scale.linear import Linear, Work
from perf.tools.report import RESULTS
from staged_pool.runtime.config import EngineConfig

H100_FLOPS: Final = 989e12
"""Peak of an H100 SXM in bfloat16, dense, in FLOP a second.

NVIDIA H100 datasheet: 1,979 teraFLOPS with sparsity, half of it without. The H200 datasheet has the same figure, so
rates of large batches that were measured on an H200 hold for an H100, too. Its memory is faster (4.8 and 3.35 TB/s).
"""

MINILM_WEIGHTS: Final = 6 * 12 * 384**2
"""Weights of MiniLM-L6 that are multiplied: 12 x width^2 for each of 6 layers of a BERT."""
BGE_LARGE_WEIGHTS: Final = 24 * 12 * 1024**2
"""The same of bge-large: 24 layers of width 1024."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device, or several equal ones that one engine process drives."""

    name: str
    forward: Linear
    """Seconds of a forward: of one device, or core seconds where `cores` is set."""
    width: int
    """Numbers of a vector."""
    slots: int = 1
    """Forwards at once."""
    cores: float | None = None
    """Cores that all slots share: a CPU. None: each slot is a device of its own."""
    short_tokens: int = 0
    """Tokens of the largest forward that takes one core, even if it is alone."""
    most_items: int = EngineConfig().max_batch_items
    least_tokens: int = EngineConfig().least_batch_tokens("cuda")
    most_tokens: int = EngineConfig().batch_tokens("cuda")
    source: str = field(default="", compare=False)
    """Origin of `forward`."""

    def seconds(self, work: Work, *, alone: bool) -> float:
        """Return the seconds of one forward.

        Args:
            work: One batch.
            alone: Nothing else runs or waits, so it has all cores. On a GPU that makes no difference.
        """
        seconds = self.forward.of(work)
        if self.cores is None:
            return seconds
        each = self.cores / self.slots
        return seconds / (self.cores if alone and work.tokens > self.short_tokens else each)

    def batch_texts(self, tokens: float) -> float:
        """Return the texts of a batch of the least token budget.

        Args:
            tokens: Mean tokens of a text.
        """
        return max(1.0, min(float(self.most_items), self.least_tokens / tokens))


def cpu_device(costs: UnitCosts, cores: float) -> Device:
    """Return the CPU of the measured machine, with MiniLM.

    Args:
        costs: Unit costs.
        cores: Cores that other work leaves to forwards.
    """
    from staged_pool.runtime.models.kernels.torch_threads import short_tokens

    config = EngineConfig()
    return Device(
        name="CPU",
        forward=costs.cpu_device,
        width=costs.width,
        slots=costs.cpu_slots,
        cores=cores,
        short_tokens=short_tokens(MINILM_WEIGHTS),
        least_tokens=config.least_batch_tokens("cpu"),
        most_tokens=config.batch_tokens("cpu"),
        source="python -m perf scale --measure",
    )


def measured_gpu(model: str, width: int, folder: Path = RESULTS) -> Device:
    """Return a device from the cells of `gpu-speed.json`: two forwards give the fixed seconds, and those of a token.

    One is a full batch, bare, back to back: its seconds are its tokens by their rate. The other is one text of 12
    tokens, alone in the engine: its seconds are the part of the time in which the device does not idle.

    Args:
        model: Name of the model in the file.
        width: Numbers of a vector.
        folder: Folder of the file.
    """
    results = json.loads((folder / "gpu-speed.json").read_text())["results"]
    cells = {cell["load"]: cell for cell in results["cells"] if cell["model"] == model}
    full, short = cells["bare m8"], cells["engine s1, 1"]
    full_s = full["batch_tokens"] / full["tokens_per_s"]
    short_s = (1.0 - short["use"]["idle"]) / short["inputs_per_s"]
    token_s = (full_s - short_s) / (full["batch_tokens"] - short["batch_tokens"])
    return Device(
        name=model,
        forward=Linear(tokens=token_s, batches=short_s - token_s * short["batch_tokens"]),
        width=width,
        source="perf/results/gpu-speed.json: an H200",
    )


def utilized(device: Device, weights: int) -> float:
    """Return the part of an H100's peak that the tokens of a device need: 2 FLOP for each weight and token.

    This is the model FLOPs utilization of Chowdhery et al. (PaLM, 2022), without attention.
    """
    return 2.0 * weights / device.forward.tokens / H100_FLOPS


def computed_gpu(name: str, width: int, weights: int, *, like: Device, utilization: float, layers: float) -> Device:
    """Return a device that was not measured, from FLOPs.

    Args:
        name: Name of the model.
        width: Numbers of a vector.
        weights: Weights that are multiplied for each token.
        like: A measured device, whose fixed seconds are taken for each layer.
        utilization: Part of the peak that it reaches: an assumption.
        layers: Its layers, as a part of those of `like`.
    """
    return Device(
        name=name,
        forward=Linear(tokens=2.0 * weights / (H100_FLOPS * utilization), batches=like.forward.batches * layers),
        width=width,
        source=f"2 x {weights / 1e6:.1f} million weights at {utilization:.0%} of 989 TFLOP/s; not measured",
    )


def table_devices() -> list[Device]:
    """Return the devices of the tables: bge-large as measured on an H200, and MiniLM as computed from it.

    MiniLM is assumed to reach half of bge-large's part of the peak, because its matrices are narrower.
    """
    large = measured_gpu("bge-large", 1024)
    half = utilized(large, BGE_LARGE_WEIGHTS) / 2
    return [large, computed_gpu("MiniLM", 384, MINILM_WEIGHTS, like=large, utilization=half, layers=6 / 24)]
