"""Heads for logits of labels: of each sequence, of each token, or of two answers of a language model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, TypeAlias

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from staged_pool.runtime.models.heads.transplant import (
    TransplantedHead,
    WholeRun,
    end_token,
    probe_sequences,
    run_whole_model,
    takes_types,
)
from staged_pool.runtime.models.kernels.misuse import MISUSE_ERRORS
from staged_pool.runtime.models.kernels.self_check import TOLERANCE, difference
from staged_pool.runtime.models.kernels.transfer import Later, begin_readback, send_arrays
from staged_pool.runtime.models.transformer.packed_transformer import PackedTransformer
from staged_pool.runtime.models.transformer.packing import PackedBatch
from staged_pool.runtime.models.transformer.pooling import cls_pool, last_token_pool, mean_pool
from staged_pool.runtime.payloads import TokenSequence, Values
from staged_pool.runtime.requests import Output
from staged_pool.stages.errors import ConfigError

_ROUNDING: Final = {torch.float32: 1e-5, torch.float16: 0.003, torch.bfloat16: 0.02}
"""Largest difference of logits that counts as rounding, relative to the largest logit.

Logits of random tokens may be nearly equal, and then a difference relative to their spread means nothing.
"""


class LabelsHead:
    """Head of the checkpoint on one vector of each sequence, in float32. Each value is [labels].

    The vector is that of the first or the last token, or the mean; only the code of each architecture knows. So all are
    tried, and compared with the logits of the whole model.

    Args:
        whole: The model with its head.
        transformer: Transformer of the model, before any speedup.
        labels: Number of labels.

    Raises:
        ConfigError: No vector gives the logits of the whole model.
    """

    def __init__(self, whole: PreTrainedModel, transformer: PackedTransformer, labels: int) -> None:
        self._head = TransplantedHead(whole, dtype=torch.float32)
        self._padding: int = -1 if (padding := _padding(whole)) is None else padding
        end = end_token(whole)
        self._picks = _ROWS if end is None else {"last end": partial(_last_end, end=end)}
        runs = _probe(whole, transformer, Output.LABELS, ends_in_padding=True)
        expected = torch.stack([run.logits for run in runs])
        if expected.shape[1:] != (labels,):
            shape = list(expected.shape[1:])
            raise ConfigError(f"{self._head.name} gives {shape} logits for an input, and there are {labels} labels")
        batch = PackedBatch.of([run.sequence for run in runs], whole.device)
        hidden = torch.cat([run.hidden for run in runs])
        tried = {row: self._compare(pick(hidden, batch, self._padding), expected) for row, pick in self._picks.items()}
        self._row = min(tried, key=tried.__getitem__)
        if tried[self._row] == float("inf"):
            raise ConfigError(
                f"{self._head.name}: its head reads neither the first nor the last token nor their mean, and is not "
                "supported"
            )

    @property
    def row(self) -> str:
        """Name of the vector that the head reads: a key of `_ROWS`, or `last end`."""
        return self._row

    def parameters(self) -> int:
        return self._head.parameters()

    def __call__(self, hidden: Tensor, batch: PackedBatch) -> Later[Sequence[Values]]:
        rows = self._picks[self._row](hidden, batch, self._padding)
        logits = begin_readback(self._head(rows.unsqueeze(1)))
        return lambda: list(logits())

    def _compare(self, rows: Tensor, expected: Tensor) -> float:
        """Return the difference of the logits of these rows from the expected ones; see `_distance`."""
        try:
            with torch.inference_mode():
                found = self._head(rows.unsqueeze(1))
        except MISUSE_ERRORS:
            return float("inf")
        return _distance(found, expected)


class TokenLabelsHead:
    """Head of the checkpoint on every token, in float32. Each value is [tokens, labels].

    Args:
        whole: The model with its head.
        transformer: Transformer of the model, before any speedup.
        labels: Number of labels.

    Raises:
        ConfigError: The head reads more than the vector of one token.
    """

    def __init__(self, whole: PreTrainedModel, transformer: PackedTransformer, labels: int) -> None:
        self._head = TransplantedHead(whole, dtype=torch.float32)
        runs = _probe(whole, transformer, Output.TOKEN_LABELS)
        expected = torch.cat([run.logits for run in runs])
        if expected.shape[1:] != (labels,):
            shape = list(expected.shape[1:])
            raise ConfigError(f"{self._head.name} gives {shape} logits for a token, and there are {labels} labels")
        _expect(self._head, torch.cat([run.hidden for run in runs]).unsqueeze(0), expected.unsqueeze(0))

    def parameters(self) -> int:
        return self._head.parameters()

    def __call__(self, hidden: Tensor, batch: PackedBatch) -> Later[Sequence[Values]]:
        logits = begin_readback(self._head(hidden.unsqueeze(0))[0])
        ends = np.cumsum([len(sequence.ids) for sequence in batch.sequences])
        return lambda: np.split(logits(), ends[:-1])


class LogitScoreHead:
    """Log odds of two answers of a language model: the difference of their logits at the last token.

    In float32. Each value is [1].

    Args:
        whole: The language model. Only the output embeddings of the answers are kept.
        transformer: Transformer of the model, before any speedup.
        true_token: Token id of the answer that means yes.
        false_token: Token id of the answer that means no. None: the score is the logit of `true_token`.
        divisor: Temperature by which scores are divided.
        rounded: Round scores to bfloat16.

    Raises:
        ConfigError: The model has no such token ids, or its head reads more than token vectors.
    """

    def __init__(
        self,
        whole: PreTrainedModel,
        transformer: PackedTransformer,
        true_token: int,
        false_token: int | None,
        *,
        divisor: float = 1.0,
        rounded: bool = False,
    ) -> None:
        self._divisor = divisor
        self._rounded = rounded
        entries = [true_token] if false_token is None else [true_token, false_token]
        self._head = TransplantedHead(whole, dtype=torch.float32, entries=entries)
        runs = _probe(whole, transformer, Output.LABELS)
        hidden = torch.stack([run.hidden[-1] for run in runs])
        expected = torch.stack([run.logits[-1, entries] for run in runs])
        _expect(self._head, hidden.unsqueeze(1), expected.unsqueeze(1))

    def parameters(self) -> int:
        return self._head.parameters()

    def __call__(self, hidden: Tensor, batch: PackedBatch) -> Later[Sequence[Values]]:
        logits = self._head(last_token_pool(hidden, batch.lengths).unsqueeze(1))[:, 0]
        scores = (logits[:, :1] - logits[:, 1:2] if logits.shape[1] > 1 else logits) / self._divisor
        read = begin_readback(scores.bfloat16().float() if self._rounded else scores)
        return lambda: list(read())


_Pick: TypeAlias = Callable[[Tensor, PackedBatch, int], Tensor]


def _last_but_padding(hidden: Tensor, batch: PackedBatch, padding: int) -> Tensor:
    """Vector of the last token that is not padding; of the first token if all are.

    Some tokenizers end every text in the padding token.
    """
    places = [
        next((place for place in range(len(s.ids) - 1, -1, -1) if s.ids[place] != padding), 0) for s in batch.sequences
    ]
    starts = batch.lengths.cumsum(0) - batch.lengths
    return hidden[starts + send_arrays([np.array(places)], hidden.device)]


def _last_end(hidden: Tensor, batch: PackedBatch, _: int, *, end: int) -> Tensor:
    """Vector of each sequence's last end token, as in BART; of its last token if it has none."""
    behind = [s.ids[::-1].index(end) if end in s.ids else 0 for s in batch.sequences]
    return hidden[batch.lengths.cumsum(0) - 1 - send_arrays([np.array(behind)], hidden.device)]


_ROWS: Final[Mapping[str, _Pick]] = {
    "first": lambda hidden, batch, _: cls_pool(hidden, batch.lengths),
    "last": lambda hidden, batch, _: last_token_pool(hidden, batch.lengths),
    "last but padding": _last_but_padding,
    "mean": lambda hidden, batch, _: mean_pool(hidden.float(), batch.lengths),
}
"""Vectors of a sequence that a head may read."""


def _probe(
    whole: PreTrainedModel, transformer: PackedTransformer, output: Output, *, ends_in_padding: bool = False
) -> list[WholeRun]:
    """Run the whole model on test sequences, and check the token vectors of its transformer.

    Raises:
        ConfigError: The transformer alone gives other vectors than inside of the model.
    """
    padding = _padding(whole)
    sequences = probe_sequences(
        vocabulary=transformer.vocabulary,
        padding=padding,
        max_tokens=min(16, transformer.position_limit or 16),
        outputs=frozenset({output}),
        pairs=takes_types(whole),
    )
    if (end := end_token(whole)) is not None:  # each has one, and not as its last token
        middles = [len(sequence.ids) // 2 for sequence in sequences]
        sequences = [
            replace(sequence, ids=[*sequence.ids[:middle], end, *sequence.ids[middle + 1 :]])
            for sequence, middle in zip(sequences, middles, strict=True)
        ]
    runs = run_whole_model(whole, sequences)
    with torch.inference_mode():
        vectors = transformer.hidden(PackedBatch.of(sequences, whole.device))
    if not difference(vectors, torch.cat([run.hidden for run in runs])) <= TOLERANCE[whole.dtype]:
        raise ConfigError(f"{type(whole).__name__} gives its head other vectors than its transformer gives alone")
    if ends_in_padding and padding is not None and len(sequences[0].ids) > 2:
        ids = [*sequences[0].ids[:-2], padding, padding]
        runs += run_whole_model(whole, [TokenSequence(ids, frozenset({output}))])
    return runs


def _padding(whole: PreTrainedModel) -> int | None:
    padding: int | None = getattr(whole.config.get_text_config(), "pad_token_id", None)
    return padding


def _expect(head: TransplantedHead, hidden: Tensor, expected: Tensor) -> None:
    """Check that a head gives these logits: [sequences, tokens, labels].

    Raises:
        ConfigError: It gives others, or fails.
    """
    try:
        with torch.inference_mode():
            found = head(hidden)
    except MISUSE_ERRORS as error:
        raise ConfigError(f"{head.name}: its head does not run by itself: {error}") from error
    if found.shape != expected.shape or _distance(found.flatten(0, 1), expected.flatten(0, 1)) == float("inf"):
        raise ConfigError(f"{head.name}: its head reads more than token vectors, and is not supported")


def _distance(found: Tensor, expected: Tensor) -> float:
    """Return the difference of logits from the expected ones, [rows, labels] both.

    It is infinite if it is more than rounding.
    """
    if found.shape != expected.shape:
        return float("inf")
    dtype, found, expected = expected.dtype, found.float(), expected.float()
    distance = difference(found, expected)
    rounding = _ROUNDING[dtype] * float(expected.abs().max())
    equal = distance <= TOLERANCE[dtype] or float((found - expected).abs().max()) <= rounding
    return distance if equal else float("inf")
