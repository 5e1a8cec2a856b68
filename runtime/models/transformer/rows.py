"""Sequences as rows of token ids, each row one sequence: alone, with others of its length, or padded to the longest."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from staged_pool.runtime.models.kernels.encoder_layers import Group
from staged_pool.runtime.models.transformer.image_embeds import ImageEmbeds
from staged_pool.runtime.models.transformer.packing import PackedBatch
from staged_pool.runtime.models.transformer.rotary import per_sequence_rotary

_POSITION_TABLES: Final = ("position_embeddings", "position_embedding")
"""How architectures name them; CLIP and SigLIP have the latter."""


class Rows:
    """Runs a transformer on rows of token ids, and gives back packed token vectors.

    Args:
        model: A base model in eval mode whose first output is [batch, tokens, width]. Its rotary modules may be
            replaced.

    Raises:
        ConfigError: Its positions depend on the length of a text in a way that is not known here.
    """

    takes_positions: bool
    """The model is told positions. False: it takes none, or counts them in a way of its own."""

    takes_types: bool
    """The model tells the two segments of a pair apart."""

    first_position: int
    """Where positions begin in the model's table of position vectors."""

    position_limit: int | None
    """Tokens that this table has rows for. None: there is no such table."""

    positions_by_length: bool
    """A position's vector depends on the length of its sequence: see `per_sequence_rotary`."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self.first_position, self.position_limit = _position_table(model)
        self._padding: int = getattr(model.config, "pad_token_id", None) or 0
        arguments = inspect.signature(model.forward).parameters
        self.takes_positions = "position_ids" in arguments
        self.takes_types = "token_type_ids" in arguments and getattr(model.config, "type_vocab_size", 0) > 1
        self._lengths = per_sequence_rotary(model)
        self.positions_by_length = self._lengths is not None
        # Where a text may be longer than the config says, some versions of transformers have too short a row of types.
        self._says_types = "token_type_ids" in arguments and not self.takes_types and self.positions_by_length

    def told(self, groups: Sequence[Group], *, packed: bool) -> AbstractContextManager[None]:
        """A block that runs one forward of these sequences, see `SequenceLengths.of`."""
        return nullcontext() if self._lengths is None else self._lengths.of(groups, packed=packed)

    def padded(self, batch: PackedBatch, shown: ImageEmbeds | None = None) -> Tensor:
        """[tokens, width], of one forward with rows that are filled up to the longest."""
        shape = len(batch.sequences), max(group.tokens for group in batch.groups)
        places = torch.arange(shape[1], device=batch.ids.device)
        rows = torch.arange(shape[0], device=batch.ids.device)
        rows = rows.repeat_interleave(batch.lengths, output_size=batch.tokens)
        each = rows * shape[1] + batch.positions[: batch.tokens]
        tokens = {
            name: _spread(row[: batch.tokens], each, shape, self._padding if name == "input_ids" else 0)
            for name, row in self.tokens(batch.ids, shown).items()
        }
        more = {}
        if self.takes_positions:
            more["position_ids"] = (places + self.first_position).expand(shape)
        if shown is not None and shown.positions is not None:
            more["position_ids"] = torch.stack([_spread(row, each, shape, 0) for row in shown.positions])
        if batch.types is not None and self.takes_types:
            more["token_type_ids"] = _spread(batch.types[: batch.tokens], each, shape, 0)
        seen = places < (batch.lengths if batch.seen is None else batch.seen).unsqueeze(1)
        with self.told(batch.groups, packed=False):
            hidden: Tensor = self._model(**tokens, attention_mask=seen.long(), **more)[0]
        return hidden.flatten(0, 1).index_select(0, each)

    def each_length(self, batch: PackedBatch, shown: ImageEmbeds | None = None) -> Tensor:
        """As `padded`, with a forward for neighbours of equal length: without any padding."""
        return self._each(batch, shown, [group.sequences for group in batch.groups])

    def one_by_one(self, batch: PackedBatch, shown: ImageEmbeds | None = None) -> Tensor:
        """As `padded`, with a forward for each sequence."""
        return self._each(batch, shown, [1] * len(batch.sequences))

    def tokens(self, ids: Tensor, shown: ImageEmbeds | None) -> dict[str, Tensor]:
        """Token ids by the name that the model has for them, or their vectors where images put some there."""
        if shown is None:
            return {"input_ids": ids} | ({"token_type_ids": torch.zeros_like(ids)} if self._says_types else {})
        known = ids.index_fill(0, shown.places, 0)  # an image token need not be in the vocabulary
        embedded: Tensor = token_embedding(self._model)(known)
        return {"inputs_embeds": embedded.index_copy(0, shown.places, shown.vectors)}

    def _each(self, batch: PackedBatch, shown: ImageEmbeds | None, counts: Sequence[int]) -> Tensor:
        """So many neighbours, which are equally long, in each forward."""
        start = token = 0
        vectors = []
        for count in counts:
            same = batch.sequences[start : start + count]
            end = token + sum(len(sequence.ids) for sequence in same)
            part = shown.between(token, end) if shown is not None else None
            vectors.append(self.padded(PackedBatch.of(same, batch.ids.device), part))
            start += count
            token = end
        return torch.cat(vectors)


def _spread(row: Tensor, each: Tensor, shape: tuple[int, int], padding: int) -> Tensor:
    """What lies one behind the other, [tokens, ...], as rows that are filled up.

    Args:
        row: The values.
        each: [tokens], int64: where each of them goes, counted through all rows.
        shape: Rows, and values of each.
        padding: What they are filled up with.
    """
    padded = row.new_full((shape[0] * shape[1], *row.shape[1:]), padding)
    return padded.index_copy_(0, each, row).view(*shape, *row.shape[1:])


def token_embedding(model: PreTrainedModel) -> Any:
    """The module that makes vectors of token ids, with its table as `weight`."""
    try:
        return model.get_input_embeddings()
    except NotImplementedError:  # transformers before 5.6 does not find that of CLIP's texts
        return model.get_submodule("embeddings.token_embedding")


def _position_table(model: PreTrainedModel) -> tuple[int, int | None]:
    """Where positions begin in the model's table of position vectors, and how many there are.

    RoBERTa and its relatives give the table the padding token's id as `padding_idx`, and count from the next row.

    Returns:
        The first row, and the rows from there on; (0, None) for a model without such a table.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and name.rpartition(".")[2] in _POSITION_TABLES:
            first = 0 if module.padding_idx is None else module.padding_idx + 1
            return first, module.num_embeddings - first
    return 0, None
