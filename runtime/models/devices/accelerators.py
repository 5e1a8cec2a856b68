"""What is particular to GPUs when a model is loaded: which there are, what they can do, and what they have room for."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import torch

from staged_pool.runtime.device_names import device_names
from staged_pool.runtime.models.devices.launch import Replica
from staged_pool.runtime.models.towers.text import TextTower
from staged_pool.runtime.models.towers.tower import Tower
from staged_pool.runtime.models.transformer.cuda_graphs import BUCKETS, Bucket, cuda_recorder
from staged_pool.runtime.models.transformer.speedups import Speedups
from staged_pool.stages.errors import ConfigError
from staged_pool.stages.log import get_logger

log = get_logger("staged_pool.models")

_RECORDED_PARAMETERS: Final = 200_000_000
"""A larger model keeps the device busy for longer than the host takes to ask for its kernels."""

_MEASURED_TOKENS: Final = 4096
"""Of the batch whose memory is looked at. What a token takes in it, it takes in a larger one."""

_KEPT_FREE: Final = 0.1
"""Of the memory: for its fragments, for rows on their way to the host, and for what libraries take when they please."""


def open_devices(device: str) -> tuple[torch.device, ...]:
    """The devices that a setting names, of which all are there.

    Raises:
        ConfigError: One is not; or see `device_names`.
    """
    names = device_names(device)
    if names == ("auto",):
        names = ("cuda",) if torch.cuda.is_available() else ("cpu",)
    if names[0] == "cpu":
        return tuple(torch.device("cpu") for _ in names)
    if not torch.cuda.is_available():
        raise ConfigError(f"device={device!r}: torch sees no CUDA device")
    count = torch.cuda.device_count()
    devices = tuple(torch.device("cuda", torch.device(name).index or 0) for name in names)
    for one in devices:
        if one.index >= count:
            raise ConfigError(f"device={device!r}: there is no {one}: torch sees {count} CUDA devices, from cuda:0 on")
    return devices


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether a GPU does that by itself, and not by way of float32."""
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)


def record_forwards(name: str, replica: Replica, *, wanted: bool) -> None:
    """Record forwards of texts of a few sizes, where the model is small, and it is right. See `Graphs`.

    Args:
        name: Of the model, for the log.
        replica: On a GPU.
        wanted: Whether the user wants that.
    """
    tower = replica.towers.get("text")
    if not wanted or not isinstance(tower, TextTower) or tower.parameters > _RECORDED_PARAMETERS:
        return
    with replica.launching("text"):
        why = Speedups(tower.transformer, tower.max_tokens).record(
            cuda_recorder(replica.device), _with_progress(BUCKETS, replica.device)
        )
    if why:
        log.info("model.not_recorded", model=name, device=str(replica.device), reason=why)
    if tokens := [bucket.tokens for bucket in tower.transformer.recorded]:
        log.info("model.recorded", model=name, device=str(replica.device), tokens=tokens)


def bytes_per_token(replica: Replica, run: Callable[[Tower, Sequence[int]], object], batch_tokens: int) -> float:
    """Measure the memory that a forward takes on a GPU, in bytes for each token of its batch.

    Args:
        replica: Warm.
        run: Runs a batch of made-up inputs of so many tokens each.
        batch_tokens: Of the largest batch that is wanted.
    """
    device, most = replica.device, 0.0
    for tower in dict.fromkeys(replica.towers.values()):
        longest = min(tower.max_tokens, batch_tokens)
        sizes = [longest] * max(1, min(_MEASURED_TOKENS, batch_tokens) // longest)
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run(tower, sizes)
        most = max(most, (torch.cuda.max_memory_allocated(device) - before) / sum(sizes))
    return most


def free_bytes(device: torch.device) -> int:
    """Return the memory of a GPU that nobody holds now. What torch keeps for later is given back before."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def fitting_tokens(
    token_bytes: Sequence[Mapping[torch.device, float]],
    lanes: Sequence[int],
    free: Callable[[torch.device], int] = free_bytes,
) -> list[int]:
    """Divide the free memory of GPUs among models: the tokens that a batch of each may have, at least 1.

    Each lane of each model has an equal part: it has a stream, and no stream takes memory that another keeps.

    Args:
        token_bytes: For each model and each of its devices what `bytes_per_token` gives. All models are loaded.
        lanes: Of each model.
        free: Gives the free memory of a device, in bytes.
    """
    sharing = Counter[torch.device]()
    for devices, count in zip(token_bytes, lanes, strict=True):
        sharing.update(dict.fromkeys(devices, count))
    parts = {device: free(device) * (1 - _KEPT_FREE) / count for device, count in sharing.items()}
    return [
        max(1, min(int(parts[device] / max(1.0, taken)) for device, taken in devices.items()))
        for devices in token_bytes
    ]


def _with_progress(buckets: Sequence[Bucket], device: torch.device) -> Iterable[Bucket]:
    """Show a progress bar on a terminal."""
    if not sys.stderr.isatty():
        return buckets
    from rich.console import Console
    from rich.progress import track

    return track(buckets, f"recording forwards on {device}", console=Console(stderr=True), transient=True)
