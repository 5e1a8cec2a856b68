"""CUDA graphs: forwards recorded once for a few batch sizes, and replayed.

The host launches hundreds of kernels for a forward. Each launch takes microseconds, and gives the interpreter lock to
another thread that waits for it. A CUDA graph launches all kernels at once. It reads and writes the memory that it was
recorded with, so a batch is copied into the inputs of the smallest recorded size that holds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from staged_pool.runtime.models.kernels.attention import Bounds
from staged_pool.runtime.models.transformer.packing import PackedBatch

T = TypeVar("T")


class Bucket(NamedTuple):
    """Batch size that a forward is recorded for."""

    tokens: int
    sequences: int


def _buckets() -> Iterator[Bucket]:
    """Make the recorded sizes, from small to large.

    A filled bucket wastes nothing, and any other computes its filler as well. So the sizes that take long are dense:
    above 1024 tokens, there are four in each octave. A bucket has one sequence for eight tokens: with more, attention
    would mostly run for sequences that are not there.
    """
    for power in range(6, 15):
        steps = (4,) if power < 10 else (4, 5, 6, 7)
        for step in steps if power < 14 else (4,):
            tokens = step << power - 2
            yield Bucket(tokens, min(tokens // 8, 512))


BUCKETS: Final = tuple(_buckets())
"""Recorded sizes: 64 to 16,384 tokens, the largest batch by default."""

LONGEST: Final = 2048
"""Longest sequence of a recorded forward, in tokens. Attention starts its blocks for as many, in each sequence."""


def bucket_for(tokens: int, sequences: int, buckets: Iterable[Bucket]) -> Bucket | None:
    """Return the first bucket that holds a batch, or None. The buckets come from small to large."""
    return next((bucket for bucket in buckets if tokens <= bucket.tokens and sequences <= bucket.sequences), None)


class Recorder(Protocol[T]):
    """Records the kernels that a function launches."""

    def __call__(self, run: Callable[[], T], /) -> tuple[Callable[[], object], T]:
        """Record `run`; return a function that replays it, and its result, whose tensors the replay writes to."""
        ...


def cuda_recorder(device: torch.device) -> Recorder[Any]:
    """Return a recorder of CUDA graphs.

    Its graphs share their memory, so all of them must be replayed on one stream.
    """
    pool = torch.cuda.graph_pool_handle()
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(run: Callable[[], T]) -> tuple[Callable[[], object], T]:
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
        recorder: Recorder[Tensor],
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
        """Record one more size. From large to small, the later ones use the memory of the first.

        Raises:
            RuntimeError: The forward cannot be recorded, for example because it waits for the device.
        """
        numbers = torch.zeros((3, bucket.tokens), dtype=torch.int64, device=self._device)
        starts = torch.zeros(bucket.sequences + 2, dtype=torch.int32, device=self._device)
        # Filler behind a batch counts as a sequence; see `PackedBatch.bounds`.
        longest = min(bucket.tokens, max(min(self._max_tokens, LONGEST), bucket.tokens // 8))
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
        self._recordings = dict(sorted(self._recordings.items()))

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
        if bucket is None or batch.bounds.longest > self._recordings[bucket].inputs.bounds.longest:
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
