"""CUDA graphs: forwards recorded once for a few batch sizes, and replayed.

A small batch of a small encoder spends most of its time on the host, which launches a hundred kernels of a few
microseconds each. A CUDA graph launches all of them at once. It reads and writes the memory that it was recorded with,
so a batch is copied into the inputs of the smallest recorded size that holds it.
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
    """Batch size that a forward is recorded for."""

    tokens: int
    sequences: int


BUCKETS: Final = tuple(Bucket(1 << power, 1 << power - 3) for power in range(6, 11))
"""Recorded sizes: 64 to 1024 tokens.

Larger batches take longer to compute than to launch. A bucket has one sequence for eight tokens: with more, attention
would mostly run for sequences that are not there.
"""


def bucket_for(tokens: int, sequences: int, buckets: Iterable[Bucket]) -> Bucket | None:
    """Return the first bucket that holds a batch, or None."""
    return next((bucket for bucket in buckets if tokens <= bucket.tokens and sequences <= bucket.sequences), None)


class Recorder(Protocol):
    """Records the kernels that a function launches."""

    def __call__(self, run: Callable[[], Tensor], /) -> tuple[Callable[[], object], Tensor]:
        """Record `run`; return a function that replays it, and the tensor that the replay writes to."""
        ...


def cuda_recorder(device: torch.device) -> Recorder:
    """Return a recorder of CUDA graphs.

    Its graphs share their memory, so all of them must be replayed on one stream.
    """
    pool = torch.cuda.graph_pool_handle()
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(run: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            run()  # at the first call libraries initialize themselves, which cannot be recorded
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads may use the device meanwhile, for another model or lane.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            output = run()
        return graph.replay, output

    return record


@dataclass(frozen=True, slots=True, eq=False)
class _Recording:
    inputs: PackedBatch
    output: Tensor
    """[tokens of the bucket, width]; the next replay overwrites it."""
    replay: Callable[[], object]


class Graphs:
    """Recorded forwards of one transformer. Not thread-safe.

    Args:
        run: Its forward, from a packed batch to [tokens, width], with attention of all sequences in one call.
        device: Device of the weights.
        max_tokens: Longest input of the model.
        recorder: See `Recorder`.
        types: The model reads token types.
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
        """Sizes that are recorded."""
        return tuple(self._recordings)

    def record(self, bucket: Bucket) -> None:
        """Record one more size. Call it from small to large.

        Raises:
            RuntimeError: The forward cannot be recorded, for example because it waits for the device.
        """
        numbers = torch.zeros((3, bucket.tokens), dtype=torch.int64, device=self._device)
        starts = torch.zeros(bucket.sequences + 2, dtype=torch.int32, device=self._device)
        # Filler behind a batch counts as a sequence; see `PackedBatch.bounds`.
        longest = min(bucket.tokens, max(self._max_tokens, bucket.tokens // 8))
        inputs = PackedBatch(
            ids=numbers[0],
            positions=numbers[1],
            lengths=numbers.new_empty(0),
            types=numbers[2] if self._types else None,
            prompts=None,
            attended=None,
            groups=(),
            bounds=Bounds(starts, longest),
            tokens=bucket.tokens,
            sequences=(),
        )
        # Recorded without sequences: the kernels do not depend on them.
        replay, output = self._recorder(lambda: self._run(inputs))
        self._recordings[bucket] = _Recording(inputs, output, replay)

    def forget(self, bucket: Bucket) -> None:
        """Drop the recording of a size, if there is one."""
        self._recordings.pop(bucket, None)

    def hidden(self, batch: PackedBatch) -> Tensor | None:
        """Replay a forward; None if no bucket holds the batch.

        Returns:
            [tokens, width], as `run` gives it. The next batch of this size overwrites it.
        """
        size = len(batch.ids)
        bucket = bucket_for(size, len(batch.sequences), self._recordings)
        if bucket is None:
            return None
        recording = self._recordings[bucket]
        inputs, starts = recording.inputs, batch.bounds.starts
        # Tokens of an earlier batch may remain behind this one; they belong to no sequence.
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
