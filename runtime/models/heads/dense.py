"""Head for one vector of each sequence: a pooling, and the modules behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from staged_pool.runtime.models.heads.modules import build_modules
from staged_pool.runtime.models.kernels.transfer import Later, begin_readback, send_arrays
from staged_pool.runtime.models.specs.model import DenseSpec, PoolingMode
from staged_pool.runtime.models.transformer.packing import PackedBatch, Skip
from staged_pool.runtime.models.transformer.pooling import end_pool, pool
from staged_pool.runtime.payloads import TokenSequence, Values

_WRONG_END = 2
"""End token id in old configs of CLIP. It is wrong: the tokenizer has another."""
_CLIP = ("clip", "clip_text_model")


class DenseHead:
    """Head for one vector of each sequence or chunk, without the final normalization.

    Its rows are views of one [sequences and chunks, width] array.

    Args:
        spec: See `DenseSpec`.
        token_width: Values of a token vector.
        whole: The checkpoint; the layers that the spec names are copied.
        base: Transformer of the checkpoint that gives the token vectors.

    Raises:
        ConfigError: Weights of the modules are missing or do not fit.
    """

    width: int
    """Values of one row."""

    def __init__(self, spec: DenseSpec, token_width: int, whole: PreTrainedModel, base: PreTrainedModel) -> None:
        modules, width = build_modules(spec.modules, token_width * len(spec.pooling), whole)
        self._modules = modules.to(base.device)
        self._at_end = spec.pooling == ("end",)
        self._pooling = cast("tuple[PoolingMode, ...]", spec.pooling)
        end: int | None = getattr(base.config, "eos_token_id", None)
        wrong = end == _WRONG_END and getattr(base.config, "model_type", "") in _CLIP
        self._end_token = None if wrong else end
        self.width = min(width, spec.truncate_dim or width)

    def parameters(self) -> int:
        return sum(p.numel() for p in self._modules.parameters())

    def __call__(self, hidden: Tensor, batch: PackedBatch) -> Later[Sequence[Values]]:
        chunked = any(sequence.chunks is not None for sequence in batch.sequences)
        if self._at_end:
            pooled = end_pool(hidden.float(), batch.sequences, batch.lengths, self._end_token)
        elif chunked:
            pooled = _pool_chunks(hidden, batch.sequences, self._pooling)
        else:
            pooled = pool(hidden, batch.lengths, self._pooling, skip=batch.prompts)
        rows = begin_readback(self._modules(pooled)[:, : self.width])
        return (lambda: _by_sequence(rows(), batch.sequences)) if chunked else (lambda: list(rows()))


def _pool_chunks(hidden: Tensor, sequences: Sequence[TokenSequence], modes: Sequence[PoolingMode]) -> Tensor:
    """Pool each chunk of a batch; a sequence without chunks is one. See `pool`.

    A prompt that pooling leaves out is left out of the first chunk.
    """
    lengths = [count for sequence in sequences for count in sequence.chunks or (len(sequence.ids),)]
    skipped = []
    for sequence in sequences:
        first, *others = sequence.chunks or (len(sequence.ids),)
        skipped += [sequence.prompt_tokens if sequence.prompt_tokens < first else 0, *[0] * len(others)]
    numbers = [np.array(lengths), np.array(skipped)]
    sent, left_out = send_arrays(numbers, hidden.device).split_with_sizes([len(lengths)] * 2)
    return pool(hidden, sent, modes, skip=Skip(left_out, sum(skipped)) if any(skipped) else None)


def _by_sequence(rows: NDArray[np.float32], sequences: Sequence[TokenSequence]) -> list[Values]:
    """Return the rows of each sequence: [chunks, width], or [width] without chunks."""
    found: list[Values] = []
    start = 0
    for sequence in sequences:
        end = start + len(sequence.chunks or (0,))
        found.append(rows[start] if sequence.chunks is None else rows[start:end])
        start = end
    return found
