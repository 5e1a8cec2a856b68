"""A model that turns each text into one vector."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import nn

from staged_pool.runtime.model import ModelCard, Row, TokenIds, Tokens
from staged_pool.runtime.models.body import Body, PackedBatch
from staged_pool.runtime.models.folder import PoolingMode
from staged_pool.runtime.models.pooling import pool
from staged_pool.runtime.models.threads import ThreadPlan
from staged_pool.runtime.models.tokenizing import TextTokenizer
from staged_pool.stages.errors import DeviceLost, InvalidInput, ModelFailed, OutOfMemory
from staged_pool.stages.work import Prepared, TextInput

_NO_MEMORY: Final = ("not enough memory", "can't allocate memory", "out of memory", "STATUS_ALLOC_FAILED")
"""How a `RuntimeError` of torch says that an allocation failed."""


@dataclass(frozen=True, slots=True, eq=False)
class TextEncoder:
    """A transformer, its pooling and what follows, behind `runtime.model.Model`.

    `preprocess` and `tokenize` may run in several threads at once, and so may `forward`, in
    `card.forward_workers` of them.
    """

    card: ModelCard
    tokenizer: TextTokenizer
    body: Body
    pooling: tuple[PoolingMode, ...]
    head: nn.Module
    """[n, pooled width] -> [n, at least `card.width`], float32."""
    plan: ThreadPlan

    @property
    def pads(self) -> bool:
        return self.body.layout == "padded"

    def preprocess(self, inputs: Sequence[TextInput]) -> Sequence[Prepared[TokenIds] | InvalidInput]:
        return self.tokenizer.preprocess(inputs)

    def tokenize(self, text: str, *, add_special_tokens: bool) -> Tokens:
        return self.tokenizer.tokenize(text, add_special_tokens=add_special_tokens)

    def forward(self, payloads: Sequence[TokenIds], at_once: int = 1, /) -> Sequence[Row | ModelFailed]:
        """Run one batch: one copy to the device, one copy of all rows back.

        Args:
            payloads: At least one, each of at least one token.
            at_once: Forwards that share torch's threads.

        Returns:
            For each payload its row, [`card.width`], float32, a view of the batch's [n, width], before the
            normalisation that the card announces; or `ModelFailed` for a row that is not finite.

        Raises:
            OutOfMemory: The device has no room for this batch.
            DeviceLost: The device can no longer be trusted.
        """
        self.plan.use(sum(map(len, payloads)), at_once)
        return self.compute(payloads)

    def compute(self, payloads: Sequence[TokenIds]) -> Sequence[Row | ModelFailed]:
        """As `forward`, on as many threads as are set."""
        with _device_errors(), torch.inference_mode():
            batch = PackedBatch.of(payloads, self.body.model.device)
            pooled = self.head(pool(self.body.hidden(batch), batch.lengths, self.pooling))
            rows = np.ascontiguousarray(pooled[:, : self.card.width].cpu().numpy())
        finite = np.isfinite(rows).all(axis=1)
        return [
            row if usable else ModelFailed("The model gave NaN or Inf for this input.")
            for row, usable in zip(rows, finite, strict=True)
        ]


@contextmanager
def _device_errors() -> Iterator[None]:
    """Say in the engine's words what happened to the device."""
    try:
        yield
    except MemoryError as error:
        raise OutOfMemory(str(error)) from error
    except RuntimeError as error:
        text = str(error)
        # Memory first: a failed allocation may come as any of these classes, and the device stands after it.
        if isinstance(error, torch.OutOfMemoryError) or any(words in text for words in _NO_MEMORY):
            raise OutOfMemory(text) from error
        if isinstance(error, torch.AcceleratorError) or "CUDA error" in text:
            raise DeviceLost(text) from error
        raise
