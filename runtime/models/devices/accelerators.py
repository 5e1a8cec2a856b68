"""GPUs at load: open devices, record forwards, measure memory."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import torch

from staged_pool.runtime.device_names import device_names
from staged_pool.runtime.models.devices.launch import Replica
from staged_pool.runtime.models.towers.image import ImageTower
from staged_pool.runtime.models.towers.text import TextTower
from staged_pool.runtime.models.towers.tower import Tower
from staged_pool.runtime.models.transformer.cuda_graphs import BUCKETS, Bucket, cuda_recorder
from staged_pool.runtime.models.transformer.speedups import Speedups
from staged_pool.stages.errors import ConfigError
from staged_pool.stages.log import get_logger

log = get_logger("staged_pool.models")

_RECORDED_WORK: Final = 10**13
"""Largest recorded forward, in weights times tokens. A larger one takes longer to compute than to launch."""

_MEASURED_TOKENS: Final = 4096
"""Tokens of the batch that memory is measured with. A larger batch takes as much for each token."""

_KEPT_FREE: Final = 0.1
"""Share of free memory that no batch uses: for fragments, rows on their way to the host, and libraries."""


def open_devices(device: str) -> tuple[torch.device, ...]:
    """Return the devices that a setting names.

    Raises:
        ConfigError: A device is missing, or the setting is wrong; see `device_names`.
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
    for missing in devices:
        if missing.index >= count:
            raise ConfigError(
                f"device={device!r}: there is no {missing}: torch sees {count} CUDA devices, from cuda:0 on"
            )
    return devices


def multiplies_bfloat16(device: torch.device) -> bool:
    """Tell whether a GPU multiplies bfloat16 natively, not by conversion to float32."""
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)


def record_forwards(name: str, replica: Replica, batch_tokens: int) -> None:
    """Record forwards of texts, and of images of one size, for a few batch sizes.

    See `Speedups.record` and `ImageEncoder.record`.

    Args:
        name: Name of the model, for the log.
        replica: Replica on a GPU.
        batch_tokens: Tokens of the largest batch of the settings.
    """
    for lane, tower in replica.towers.items():
        tokens = min(batch_tokens, _RECORDED_WORK // max(1, tower.parameters))
        with replica.launching(lane):
            recorder = cuda_recorder(replica.device)
            if isinstance(tower, TextTower):
                buckets = [bucket for bucket in BUCKETS if bucket.tokens <= tokens]
                reason = Speedups(tower.transformer, tower.max_tokens).record(
                    recorder, _with_progress(buckets, replica.device)
                )
                recorded = [bucket.tokens for bucket in tower.transformer.recorded]
            elif isinstance(tower, ImageTower):
                reason = tower.record(recorder, tokens)
                recorded = [count * tower.sample_tokens for count in tower.encoder.recorded]
            else:
                continue
        if reason:
            log.info("model.not_recorded", model=name, lane=lane, device=str(replica.device), reason=reason)
        if recorded:
            log.debug("model.recorded", model=name, lane=lane, device=str(replica.device), tokens=recorded)


def bytes_per_token(replica: Replica, run: Callable[[Tower, Sequence[int]], object], batch_tokens: int) -> float:
    """Measure the GPU memory of a forward, in bytes for each token of the batch.

    Args:
        replica: Replica after its warm-up.
        run: Runs a batch of test inputs with these numbers of tokens.
        batch_tokens: Tokens of the largest batch of the settings.
    """
    device, largest = replica.device, 0.0
    for tower in dict.fromkeys(replica.towers.values()):
        longest = min(tower.max_tokens, batch_tokens)
        sizes = [longest] * max(1, min(_MEASURED_TOKENS, batch_tokens) // longest)
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run(tower, sizes)
        largest = max(largest, (torch.cuda.max_memory_allocated(device) - before) / sum(sizes))
    return largest


def free_bytes(device: torch.device) -> int:
    """Return the free memory of a GPU in bytes, after torch has released its cache."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def fitting_tokens(
    token_bytes: Sequence[Mapping[torch.device, float]],
    lanes: Sequence[int],
    free: Callable[[torch.device], int] = free_bytes,
) -> list[int]:
    """Divide the free memory of GPUs among models.

    Each lane of each model gets an equal share, since each has a stream, and streams do not share cached memory.

    Args:
        token_bytes: Result of `bytes_per_token` for each model and each of its devices. All models are loaded.
        lanes: Number of lanes of each model.
        free: Gives the free memory of a device, in bytes.

    Returns:
        For each model the largest batch, in tokens, at least 1.
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
