"""Head for one vector of each sequence: a pooling, and the modules behind it."""

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
"""End token id in old configs of CLIP. It is wrong: the tokenizer has another."""


class DenseHead:
    """Head for one vector of each sequence, without the final normalization.

    Its rows are views of one [sequences, width] array.

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
