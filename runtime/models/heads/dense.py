"""One vector for each sequence: a pooling of its token vectors, and the modules that follow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import Tensor
from transformers import PreTrainedModel

from staged_pool.runtime.model import Values
from staged_pool.runtime.models.heads.modules import build_modules
from staged_pool.runtime.models.kernels.transfer import Later, begin_readback
from staged_pool.runtime.models.specs.model import DenseSpec, PoolingMode
from staged_pool.runtime.models.transformer.packing import PackedBatch
from staged_pool.runtime.models.transformer.pooling import end_pool, pool

_WRONG_END = 2
"""The id of the end in configs of CLIP that were written before transformers had it right: the tokenizer's differs."""


class DenseHead:
    """Rows are views of one [sequences, width] array, before the normalisation at the end of the chain.

    Args:
        spec: See `DenseSpec`.
        token_width: Values of a token vector.
        whole: The checkpoint. Layers of its own are copied.
        base: The transformer in it that gives the token vectors.

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
        self._end_token = None if end == _WRONG_END else end
        self.width = min(width, spec.truncate_dim or width)

    def parameters(self) -> int:
        return sum(p.numel() for p in self._modules.parameters())

    def __call__(self, hidden: Tensor, batch: PackedBatch) -> Later[Sequence[Values]]:
        if self._at_end:
            pooled = end_pool(hidden.float(), batch.sequences, batch.lengths, self._end_token)
        else:
            pooled = pool(hidden, batch.lengths, self._pooling, skip=batch.prompts)
        rows = begin_readback(self._modules(pooled)[:, : self.width])
        return lambda: list(rows())
