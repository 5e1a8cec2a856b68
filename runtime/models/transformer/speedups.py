"""Speedups of a packed transformer, each kept only if it gives the same vectors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

from staged_pool.runtime.models.kernels.attention import takes_varlen
from staged_pool.runtime.models.kernels.encoder_layers import Group
from staged_pool.runtime.models.kernels.linear import prepack_linears, replace_linears
from staged_pool.runtime.models.kernels.self_check import keep_if_equal
from staged_pool.runtime.models.quantizing.agreement import Agreement
from staged_pool.runtime.models.quantizing.int8 import Int8Linear
from staged_pool.runtime.models.quantizing.ranges import record_ranges
from staged_pool.runtime.models.transformer.cuda_graphs import BUCKETS, LONGEST, Bucket, Graphs, Recorder
from staged_pool.runtime.models.transformer.fused import FusedLayers, fuse_layers, fusible_layers
from staged_pool.runtime.models.transformer.packed_transformer import PackedTransformer
from staged_pool.runtime.payloads import TokenSequence
from staged_pool.stages.errors import ConfigError

_RANDOM_TOKENS: Final = (4, 8, 16, 32, 64, 128) * 5
"""Lengths of random sequences: they have rarer values than texts, which texts of other kinds may have, too."""


class Speedups:
    """Speedups of one transformer.

    Each method returns None where the speedup is in use or does not apply, and otherwise the reason why it is not used.

    Args:
        transformer: In the layout that it will run in.
        max_tokens: Longest input of the model.
    """

    def __init__(self, transformer: PackedTransformer, max_tokens: int) -> None:
        self._transformer = transformer
        self._max_tokens = max_tokens
        self._vectors: Tensor | None = None
        """Vectors of the probe, as the transformer computes them now. None: not computed yet."""

    def fuse(self) -> str | None:
        """Run layers of a known structure in few kernel calls."""
        transformer = self._transformer
        places = [] if transformer.start_state is not None else fusible_layers(transformer.model)
        return self._keep_if_equal(partial(fuse_layers, places)) if places else None

    def quantize(self, typical: Sequence[TokenSequence], compute: Callable[[], Tensor]) -> Agreement:
        """Run linear layers in int8, those of a known structure in few kernel calls.

        Args:
            typical: Inputs that set the ranges of the layers; random ones are added to them.
            compute: Returns vectors, [texts, width], for the same other texts each time.

        Returns:
            The agreement of the vectors of `compute` with those of the model as it was.

        Raises:
            ConfigError: Forwards change the model, or it has adapters to choose from, or no linear layers.
            NO_KERNEL: This build of torch or this processor lacks the kernels.
        """
        transformer, model = self._transformer, self._transformer.model
        if transformer.start_state is not None:
            raise ConfigError("dtype='int8': forwards change the model; use float32 or bfloat16")
        if transformer.adapters is not None:
            raise ConfigError("dtype='int8': is not for models with several adapters; use float32 or bfloat16")
        random = transformer.probes(self._max_tokens).random_sequences(
            [min(self._max_tokens, length) for length in _RANDOM_TOKENS], np.random.default_rng(0)
        )

        def run() -> None:
            for sequence in (*typical, *random):  # each alone: padding would widen the ranges
                transformer.hidden(transformer.pack([sequence]))

        with torch.inference_mode():
            before, self._vectors = compute(), None
            ranges = record_ranges([module for module in model.modules() if type(module) is nn.Linear], run)
            if not ranges:
                raise ConfigError(f"dtype='int8': {type(model).__name__} has no linear layers; use float32")
            fuse_layers(fusible_layers(model), ranges=ranges)
            replace_linears(
                model,
                lambda linear: Int8Linear(linear.weight, linear.bias, ranges[linear]) if linear in ranges else linear,
            )
            return Agreement.of(compute(), before)

    def prepack(self) -> str | None:
        """Lay the weights of linear layers out for the processor."""
        if self._transformer.start_state is not None:
            return "forwards change the model"
        return self._keep_if_equal(partial(prepack_linears, self._transformer.model))

    def call_parts(self) -> str | None:
        """Call only the embeddings and the fused layers.

        The Python code of transformers around them takes time in each batch, and adds nothing.
        """
        transformer = self._transformer
        embeddings = getattr(transformer.model, "embeddings", None)
        fused = [module for module in transformer.model.modules() if isinstance(module, FusedLayers)]
        if transformer.layout != "packed" or len(fused) != 1 or not isinstance(embeddings, nn.Module):
            return None
        layers = fused[0]

        def parts(*, packed_groups: Sequence[Group], **tokens: Tensor) -> tuple[Tensor]:
            return (layers(embeddings(**tokens), packed_groups=packed_groups),)

        def change() -> Callable[[], None]:
            transformer.run_packed = parts
            return partial(setattr, transformer, "run_packed", transformer.model)

        return self._keep_if_equal(change)

    def attend_in_one_call(self) -> str | None:
        """Compute attention of all sequences of a packed batch in one kernel call."""
        transformer = self._transformer
        if transformer.layout != "packed" or not takes_varlen(transformer.device, transformer.model.dtype):
            return None

        def change() -> Callable[[], None]:
            transformer.attends_in_one_call = True
            return partial(setattr, transformer, "attends_in_one_call", False)

        return self._keep_if_equal(change)

    def record(self, recorder: Recorder[Tensor], buckets: Iterable[Bucket] = BUCKETS) -> str | None:
        """Record forwards of a few batch sizes, and replay them for batches that fit.

        A size that fails is left out, and the others stay. Nothing is recorded if sequences do not attend in one call.

        Args:
            recorder: See `Recorder`.
            buckets: The sizes.

        Returns:
            The reason why the first size that failed is left out. None: all are recorded.
        """
        transformer = self._transformer
        if not transformer.attends_in_one_call:
            return None
        if transformer.rows.positions_by_length:
            return "positions depend on the lengths of the texts, which a recording does not contain"
        graphs = Graphs(
            transformer.compute_one_row,
            transformer.device,
            self._max_tokens,
            recorder,
            types=transformer.rows.takes_types,
        )
        reasons = []
        for bucket in sorted(buckets, reverse=True):  # the large ones first: the others use their memory again
            probes = [transformer.pack(sequences) for sequences in self._probes_for(bucket)]
            name = f"{type(transformer.model).__name__}, recorded for {bucket.tokens} tokens,"
            transformer.graphs = None
            reason = keep_if_equal(
                partial(self._record, graphs, bucket),
                # Cloned: the next replay overwrites the output of this one.
                lambda probes=probes: torch.cat([transformer.hidden(probe).clone() for probe in probes]),  # type: ignore[misc]
                name=name,
                dtype=transformer.model.dtype,
            )
            if reason:
                graphs.forget(bucket)
                reasons.append(reason)
        transformer.graphs = graphs if graphs.buckets else None
        return reasons[0] if reasons else None

    def _record(self, graphs: Graphs, bucket: Bucket) -> Callable[[], None]:
        """Record one size, and replay from then on. Returns the undo."""
        graphs.record(bucket)
        self._transformer.graphs = graphs
        return partial(setattr, self._transformer, "graphs", None)

    def _probes_for(self, bucket: Bucket) -> Iterator[Sequence[TokenSequence]]:
        """Make two batches of this size: data that the first one leaves behind would spoil the second."""
        probes, random = self._transformer.probes(self._max_tokens), np.random.default_rng(0)
        length = min(self._max_tokens, LONGEST, bucket.tokens // 4)
        for share in (0.75, 0.625):
            count = int(bucket.tokens * share / length)
            yield probes.random_sequences([max(1, length - place % 3) for place in range(count)], random)

    def _keep_if_equal(self, change: Callable[[], Callable[[], None]]) -> str | None:
        """Make a change, and undo it if the vectors of the probe differ; see `self_check.keep_if_equal`.

        The vectors after one change are those before the next, so they are not computed again.
        """
        transformer = self._transformer
        known, self._vectors = self._vectors, None
        computed = [] if known is None else [known]
        calls = 0

        def compute() -> Tensor:
            nonlocal calls
            calls += 1
            if calls > len(computed):
                computed.append(transformer.hidden(transformer.probe(self._max_tokens)))
            return computed[calls - 1]

        name = type(transformer.model).__name__
        reason = keep_if_equal(change, compute, name=name, dtype=transformer.model.dtype)
        if computed:
            self._vectors = computed[-1] if reason is None else computed[0]
        return reason
