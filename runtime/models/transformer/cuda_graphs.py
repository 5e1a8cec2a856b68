"""Forwards that are recorded once for a few sizes, and replayed.

A small encoder spends most of a small batch on the host, which asks for a hundred kernels of a few microseconds each. A
CUDA graph is all of them in one request. What is replayed reads and writes the memory that it was recorded with, so a
batch is brought into the inputs of the smallest recorded size that holds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import torch
from torch import Tensor

from staged_pool.runtime.models.kernels.attention import Bounds
from staged_pool.runtime.models.transformer.packing import PackedBatch


class Bucket(NamedTuple):
    """A size of batches."""

    tokens: int
    sequences: int


BUCKETS: Final = tuple(Bucket(1 << power, 1 << power - 3) for power in range(6, 11))
"""64 to 1024 tokens; beyond that the device has longer to compute than the host to ask. Where sequences are of less
than eight tokens on average, attention would mostly be started for sequences that are not there."""


def bucket_for(tokens: int, sequences: int, buckets: Iterable[Bucket]) -> Bucket | None:
    """The first that holds a batch; None where none does."""
    return next((one for one in buckets if tokens <= one.tokens and sequences <= one.sequences), None)


class Recorder(Protocol):
    """Records what a function asks of the device."""

    def __call__(self, run: Callable[[], Tensor], /) -> tuple[Callable[[], object], Tensor]:
        """What asks for all of it again, and the tensor that it writes to."""
        ...


def cuda_recorder(device: torch.device) -> Recorder:
    """Records on a CUDA device. All that is recorded shares its memory: it must be replayed on one stream."""
    pool = torch.cuda.graph_pool_handle()
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(run: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            run()  # libraries set themselves up at the first call, which cannot be recorded
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile: for another model, or another lane.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            output = run()
        return graph.replay, output

    return record


@dataclass(frozen=True, slots=True, eq=False)
class _Recording:
    inputs: PackedBatch
    output: Tensor
    """[tokens of the bucket, width]."""
    replay: Callable[[], object]


class Graphs:
    """The recorded forwards of one transformer. Not for several threads at once.

    Args:
        run: Its forward, from packed batch to [tokens, width]. Its sequences attend in one call.
        device: Where the weights are.
        max_tokens: Longest input of the model.
        recorder: See `Recorder`.
        types: Whether the model reads token types.
    """

    def __init__(
        self,
        run: Callable[[PackedBatch], Tensor],
        device: torch.device,
        max_tokens: int,
        recorder: Recorder,
        *,
        types: bool,
    ) -> None:
        self._run = run
        self._device = device
        self._max_tokens = max_tokens
        self._recorder = recorder
        self._types = types
        self._recordings: dict[Bucket, _Recording] = {}

    @property
    def buckets(self) -> Sequence[Bucket]:
        """Those that are recorded."""
        return tuple(self._recordings)

    def record(self, bucket: Bucket) -> None:
        """Record one more. From small to large.

        Raises:
            RuntimeError: The forward does something that cannot be recorded, such as waiting for the device.
        """
        numbers = torch.zeros((3, bucket.tokens), dtype=torch.int64, device=self._device)
        starts = torch.zeros(bucket.sequences + 2, dtype=torch.int32, device=self._device)
        # What is behind a batch counts as a sequence of it; see `PackedBatch`.
        longest = min(bucket.tokens, max(self._max_tokens, bucket.tokens // 8))
        inputs = PackedBatch(
            ids=numbers[0],
            positions=numbers[1],
            lengths=numbers.new_empty(0),
            types=numbers[2] if self._types else None,
            prompts=None,
            seen=None,
            groups=(),
            bounds=Bounds(starts, longest),
            tokens=bucket.tokens,
            sequences=(),
        )
        # Recorded without any sequence: whatever there is, the kernels are the same.
        replay, output = self._recorder(lambda: self._run(inputs))
        self._recordings[bucket] = _Recording(inputs, output, replay)

    def forget(self, bucket: Bucket) -> None:
        """Drop a size, if it is recorded."""
        self._recordings.pop(bucket, None)

    def hidden(self, batch: PackedBatch) -> Tensor | None:
        """What `run` makes of a batch: [tokens, width], of memory that the next batch of this size takes. None: no
        bucket holds it."""
        size = len(batch.ids)
        bucket = bucket_for(size, len(batch.sequences), self._recordings)
        if bucket is None:
            return None
        recording = self._recordings[bucket]
        inputs, starts = recording.inputs, batch.bounds.starts
        # What is left of an earlier batch behind it belongs to no sequence.
        inputs.ids[:size].copy_(batch.ids)
        inputs.positions[:size].copy_(batch.positions)
        if inputs.types is not None and batch.types is None:
            inputs.types.zero_()
        elif inputs.types is not None and batch.types is not None:
            inputs.types[:size].copy_(batch.types)
        inputs.bounds.starts[: len(starts)].copy_(starts)
        inputs.bounds.starts[len(starts) :].fill_(size)
        recording.replay()
        return recording.output[: batch.tokens]
