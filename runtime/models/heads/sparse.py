"""Heads for sparse vectors: weights of vocabulary entries, or of each token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedModel

from staged_pool.runtime.models.heads.modules import load_projection, load_vector
from staged_pool.runtime.models.heads.transplant import TransplantedHead, probe_sequences, run_whole_model
from staged_pool.runtime.models.kernels.misuse import MISUSE_ERRORS
from staged_pool.runtime.models.kernels.self_check import TOLERANCE, difference
from staged_pool.runtime.models.kernels.transfer import Later, begin_readback, hand_over
from staged_pool.runtime.models.specs.model import SpladeSpec, TokenWeightsSpec
from staged_pool.runtime.models.tokenizing.tokenizer_file import TOKENIZER_FILE
from staged_pool.runtime.models.transformer.packing import PackedBatch
from staged_pool.runtime.payloads import SparseVector, Values
from staged_pool.runtime.requests import Output, Outputs
from staged_pool.runtime.sparse_weights import largest_weights
from staged_pool.runtime.tokens import TokenIds
from staged_pool.stages.errors import ConfigError

_SPARSE_ONLY: Final[Outputs] = frozenset({Output.SPARSE})

_SLICE_BYTES: Final = 64 * 2**20
"""Memory limit of the float32 logits that exist at once. Those of a whole batch could take gigabytes."""


class VocabularyHead(Protocol):
    """Head that computes the logits of a masked language model."""

    def __call__(self, hidden: Tensor) -> Tensor:
        """Compute logits: [1, tokens, width] -> [1, tokens, vocabulary]."""
        ...

    def parameters(self) -> int: ...


class SpladeHead:
    """SPLADE head: a weight for each vocabulary entry.

    The weight of entry v is the maximum over the tokens t of log(1 + relu(logit_tv)), or the sum (Formal et al., 2021,
    https://arxiv.org/abs/2109.10086, and https://arxiv.org/abs/2107.05720). Special tokens count, as in SpladePooling
    of sentence-transformers.

    Args:
        spec: See `SpladeSpec`.
        logits: Head of the model.
        vocabulary: Number of logits for a token.
        slice_bytes: Memory limit of the logits that exist at once; at least those of one token.
    """

    def __init__(
        self, spec: SpladeSpec, logits: VocabularyHead, vocabulary: int, *, slice_bytes: int = _SLICE_BYTES
    ) -> None:
        self._spec = spec
        self._logits = logits
        self._slice_tokens = max(1, slice_bytes // (4 * vocabulary))

    def parameters(self) -> int:
        return self._logits.parameters()

    def __call__(self, hidden: Tensor, batch: PackedBatch) -> Later[Sequence[Values]]:
        handed = hand_over(hidden)  # rows() waits for the device, which alone knows the number of entries

        def rows() -> Sequence[Values]:
            found: list[Values] = []
            start, vectors = 0, handed()
            for lengths in _groups([len(s.ids) for s in batch.sequences], self._slice_tokens):
                end = start + sum(lengths)
                pooled = _sparse_rows(self._pooled(vectors[start:end], lengths))
                found += [largest_weights(vector, self._spec.max_active_dims) for vector in pooled]
                start = end
            return found

        return rows

    def _pooled(self, hidden: Tensor, lengths: Sequence[int]) -> Tensor:
        """Pool sequences that fit into one slice, or a single longer one: [sequences, vocabulary], float32."""
        if len(lengths) > 1:
            pooled = self._reduced(hidden, lengths)
        else:
            pooled = torch.zeros(())  # the first slice replaces it: a sequence has at least one token
            for place, part in enumerate(torch.split(hidden, self._slice_tokens)):
                found = self._reduced(part, [len(part)])
                if place == 0:
                    pooled = found
                else:
                    pooled = pooled.maximum(found) if self._spec.pooling == "max" else pooled + found
        # The activation is monotonic, so it can follow the maximum, and runs once a sequence.
        return self._activated(pooled) if self._spec.pooling == "max" else pooled

    def _reduced(self, hidden: Tensor, lengths: Sequence[int]) -> Tensor:
        """Reduce the logits of each sequence over its tokens: their maximum, or the sum of their activations."""
        logits = self._logits(hidden.unsqueeze(0))[0].float()
        if self._spec.pooling == "max":
            return torch.stack([part.amax(dim=0) for part in torch.split(logits, list(lengths))])
        return torch.stack([part.sum(dim=0) for part in torch.split(self._activated(logits), list(lengths))])

    def _activated(self, logits: Tensor) -> Tensor:
        once = logits.relu().log1p_()
        return once.log1p_() if self._spec.activation == "log1p_relu" else once


def build_splade(spec: SpladeSpec, whole: PreTrainedModel, *, max_tokens: int) -> SpladeHead:
    """Build the SPLADE head of a masked language model.

    The head of the model must give the same logits apart from its transformer.

    Args:
        spec: See `SpladeSpec`.
        whole: A model such as `BertForMaskedLM`, in eval mode.
        max_tokens: Longest input of the model.

    Raises:
        ConfigError: The head does not run apart from its transformer, or gives other logits then.
    """
    head = TransplantedHead(whole)
    probe = probe_sequences(
        vocabulary=whole.get_input_embeddings().num_embeddings,
        padding=getattr(whole.config, "pad_token_id", None),
        max_tokens=max_tokens,
        outputs=_SPARSE_ONLY,
        pairs=False,
    )
    with torch.inference_mode():
        runs = run_whole_model(whole, probe)
        try:
            found = torch.cat([head(run.hidden.unsqueeze(0))[0] for run in runs])
        except MISUSE_ERRORS as error:
            raise ConfigError(f"the head of {head.name} does not run by itself: {error}") from error
    wanted = torch.cat([run.logits for run in runs])
    if found.shape != wanted.shape or not difference(found, wanted) <= TOLERANCE[whole.dtype]:
        raise ConfigError(f"the head of {head.name} gives other logits by itself than with its transformer")
    return SpladeHead(spec, head, wanted.shape[1])


class TokenWeightsHead:
    """Lexical weights of BGE-M3: the largest relu(w h + b) of each token id in a sequence.

    Special tokens are left out (Chen et al., 2024, https://arxiv.org/abs/2402.03216, section 3.2; FlagEmbedding's
    `_process_token_weights`).

    Args:
        spec: See `TokenWeightsSpec`.
        token_width: Values of a token vector.
        tokenizer: Tokenizer of the folder, for the ids of the special tokens.
        device: Device of the weights.

    Raises:
        ConfigError: The weights are missing or do not fit.
    """

    def __init__(self, spec: TokenWeightsSpec, token_width: int, tokenizer: Tokenizer, device: torch.device) -> None:
        self._linear = load_projection(spec.projection, token_width).to(device)
        if self._linear.out_features != 1:
            file = spec.projection.files[0].stem
            raise ConfigError(f"{file}: must give one weight for a token, it gives {self._linear.out_features}")
        known = [tokenizer.token_to_id(token) for token in spec.left_out]
        self._left_out = np.array([i for i in known if i is not None], np.int64)
        self.first, self.last = known[:2]
        """Token ids of the special tokens before and behind a text; None if there is none."""

    def parameters(self) -> int:
        return sum(p.numel() for p in self._linear.parameters())

    def __call__(self, hidden: Tensor, batch: PackedBatch) -> Later[Sequence[Values]]:
        weights = self.each(hidden, batch)
        return lambda: [self._row(sequence.ids, own) for sequence, own in zip(batch.sequences, weights(), strict=True)]

    def each(self, hidden: Tensor, batch: PackedBatch) -> Later[list[NDArray[np.float32]]]:
        """Start to compute w h + b of every token: [tokens] for each sequence."""
        copied = begin_readback(self._linear(hidden.float())[:, 0])
        ends = np.cumsum([len(sequence.ids) for sequence in batch.sequences])
        return lambda: np.split(copied(), ends[:-1])

    def _row(self, ids: TokenIds, weights: NDArray[np.float32]) -> SparseVector:
        indices, places = np.unique(np.array(ids, np.int64), return_inverse=True)
        largest = np.zeros(len(indices), np.float32)
        with np.errstate(invalid="ignore"):  # keeps NaN, which a later check finds; values below 0 become 0, as by relu
            np.maximum.at(largest, places, weights)
        kept = ~(largest <= 0) & ~np.isin(indices, self._left_out)
        return SparseVector(indices[kept].astype(np.int32), largest[kept])


class TokenLookup:
    """Weights of a query's tokens, looked up in a table: SparseStaticEmbedding of sentence-transformers.

    Args:
        folder: Folder of the module, with a weight for each token, or with the path of a file that has them.
        tokenizer: Tokenizer of the model, which must have the tokens of the folder's own.
        max_active_dims: See `SpladeSpec`.

    Raises:
        ConfigError: The weights are missing, damaged or do not fit the tokenizer.
    """

    def __init__(self, folder: Path, tokenizer: Tokenizer, max_active_dims: int | None = None) -> None:
        self._most = max_active_dims
        own = folder / TOKENIZER_FILE
        if own.is_file() and Tokenizer.from_file(str(own)).get_vocab() != tokenizer.get_vocab():
            raise ConfigError(f"{folder.name}/{own.name}: queries and documents have different tokens")
        self._weights = load_vector(folder, "weight").numpy()
        if len(self._weights) < (tokens := tokenizer.get_vocab_size()):
            raise ConfigError(f"{folder.name}: has {len(self._weights)} weights for {tokens} tokens")

    def __call__(self, ids: TokenIds) -> SparseVector:
        """Return the weight of each token that is present."""
        indices = np.unique(np.array(ids, np.int32))
        weights = self._weights[indices]
        return largest_weights(SparseVector(indices[weights != 0], weights[weights != 0]), self._most)


class EachTokenHead:
    """Weight of each token, w h + b, without the special tokens at the ends.

    Each value is [tokens]. vLLM gives these, before relu, for `token_classify` of BGE-M3.

    Args:
        sparse: Sparse head with the same weights.
    """

    def __init__(self, sparse: TokenWeightsHead) -> None:
        self._sparse = sparse

    def parameters(self) -> int:
        return 0  # the sparse head counts them

    def __call__(self, hidden: Tensor, batch: PackedBatch) -> Later[Sequence[Values]]:
        weights = self._sparse.each(hidden, batch)
        return lambda: [
            self._inner(sequence.ids, own) for sequence, own in zip(batch.sequences, weights(), strict=True)
        ]

    def _inner(self, ids: TokenIds, weights: NDArray[np.float32]) -> NDArray[np.float32]:
        start = 1 if ids[0] == self._sparse.first else 0
        # A copy: a view in the result cache would keep the weights of the whole batch.
        return weights[start : len(ids) - 1 if ids[-1] == self._sparse.last else len(ids)].copy()


def _groups(lengths: Sequence[int], limit: int) -> Iterator[list[int]]:
    """Group neighbours with at most `limit` tokens together; a longer one is alone."""
    group: list[int] = []
    for length in lengths:
        if group and sum(group) + length > limit:
            yield group
            group = []
        group.append(length)
    if group:
        yield group


def _sparse_rows(weights: Tensor) -> list[SparseVector]:
    """Convert [rows, width] to sparse rows without zeros.

    It takes three copies to the host for all rows together, and waits for them, since only the device knows the number
    of entries.
    """
    above = ~(weights <= 0)  # keeps NaN, which a later check finds
    rows, columns = above.nonzero(as_tuple=True)
    ends = np.cumsum(above.sum(dim=1).cpu().numpy())[:-1]
    indices = np.split(columns.int().cpu().numpy(), ends)
    values = np.split(begin_readback(weights[rows, columns])(), ends)
    return [SparseVector(i.copy(), v.copy()) for i, v in zip(indices, values, strict=True)]
