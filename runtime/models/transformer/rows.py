"""Forwards of batches with one row a sequence: alone, with others of equal length, or padded."""

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
"""Names of position tables in transformers; the second is that of CLIP and SigLIP."""


class Rows:
    """Run a transformer on rows of token ids; return packed token vectors.

    Args:
        model: A base model in eval mode whose first output is [batch, tokens, width]. Its rotary modules may be
            replaced.

    Raises:
        ConfigError: Its positions depend on the length of a text in an unknown way.
    """

    takes_positions: bool
    """Pass position ids to the model. False: it takes none, or counts them in a way of its own."""

    takes_types: bool
    """Pass token type ids: the model distinguishes the two segments of a pair."""

    first_position: int
    """First row that is used of the model's table of position vectors."""

    position_limit: int | None
    """Longest sequence, in tokens, that this table has rows for. None: there is no such table."""

    positions_by_length: bool
    """Position vectors depend on the length of the sequence: see `per_sequence_rotary`."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self.first_position, self.position_limit = _position_table(model)
        self._padding: int = getattr(model.config, "pad_token_id", None) or 0
        arguments = inspect.signature(model.forward).parameters
        self.takes_positions = "position_ids" in arguments
        self.takes_types = "token_type_ids" in arguments and getattr(model.config, "type_vocab_size", 0) > 1
        self._lengths = per_sequence_rotary(model)
        self.positions_by_length = self._lengths is not None
        # Some versions of transformers make too few token types for a text that is longer than the config says.
        self._gives_types = "token_type_ids" in arguments and not self.takes_types and self.positions_by_length

    def forward_of(self, groups: Sequence[Group], *, packed: bool) -> AbstractContextManager[None]:
        """Open a block that runs one forward of these sequences; see `SequenceLengths.set`."""
        return nullcontext() if self._lengths is None else self._lengths.set(groups, packed=packed)

    def padded(self, batch: PackedBatch, image_embeds: ImageEmbeds | None = None) -> Tensor:
        """Run one forward with all rows padded to the longest; returns [tokens, width]."""
        shape = len(batch.sequences), max(group.tokens for group in batch.groups)
        columns = torch.arange(shape[1], device=batch.ids.device)
        rows = torch.arange(shape[0], device=batch.ids.device)
        rows = rows.repeat_interleave(batch.lengths, output_size=batch.tokens)
        indices = rows * shape[1] + batch.positions[: batch.tokens]
        tokens = {
            name: _spread(row[: batch.tokens], indices, shape, self._padding if name == "input_ids" else 0)
            for name, row in self.tokens(batch.ids, image_embeds).items()
        }
        more: dict[str, Any] = {}
        if self.takes_positions:
            more["position_ids"] = (columns + self.first_position).expand(shape)
        if image_embeds is not None and image_embeds.positions is not None:
            more["position_ids"] = torch.stack([_spread(row, indices, shape, 0) for row in image_embeds.positions])
        if batch.types is not None and self.takes_types:
            more["token_type_ids"] = _spread(batch.types[: batch.tokens], indices, shape, 0)
        attended = columns < (batch.lengths if batch.attended is None else batch.attended).unsqueeze(1)
        more |= deepstack(image_embeds)
        with self.forward_of(batch.groups, packed=False):
            hidden: Tensor = self._model(**tokens, attention_mask=attended.long(), **more)[0]
        return hidden.flatten(0, 1).index_select(0, indices)

    def by_length(self, batch: PackedBatch, image_embeds: ImageEmbeds | None = None) -> Tensor:
        """Run one forward for each group of neighbours of equal length, so without padding."""
        return self._in_forwards(batch, image_embeds, [group.sequences for group in batch.groups])

    def one_by_one(self, batch: PackedBatch, image_embeds: ImageEmbeds | None = None) -> Tensor:
        """Run one forward for each sequence."""
        return self._in_forwards(batch, image_embeds, [1] * len(batch.sequences))

    def tokens(self, ids: Tensor, image_embeds: ImageEmbeds | None) -> dict[str, Tensor]:
        """Keyword arguments with the token ids, or with token vectors where images replace some."""
        if image_embeds is None:
            return {"input_ids": ids} | ({"token_type_ids": torch.zeros_like(ids)} if self._gives_types else {})
        known = ids.index_fill(0, image_embeds.places, 0)  # an image token need not be in the vocabulary
        embedded: Tensor = token_embedding(self._model)(known)
        given = {"inputs_embeds": embedded.index_copy(0, image_embeds.places, image_embeds.vectors)}
        if image_embeds.deepstack is not None:
            given["visual_pos_masks"] = torch.zeros_like(ids, dtype=torch.bool).index_fill(0, image_embeds.places, True)
        return given

    def _in_forwards(self, batch: PackedBatch, image_embeds: ImageEmbeds | None, counts: Sequence[int]) -> Tensor:
        """Run one forward for each count of neighbours.

        Args:
            batch: The sequences.
            image_embeds: As for `padded`.
            counts: Sequences in each forward; they have equal lengths, and all of the batch are covered.
        """
        start = token = 0
        vectors = []
        for count in counts:
            same = batch.sequences[start : start + count]
            end = token + sum(len(sequence.ids) for sequence in same)
            part = image_embeds.between(token, end) if image_embeds is not None else None
            vectors.append(self.padded(PackedBatch.of(same, batch.ids.device), part))
            start += count
            token = end
        return torch.cat(vectors)


def deepstack(image_embeds: ImageEmbeds | None) -> dict[str, Any]:
    """Keyword argument with the vectors that are added after each of the first layers; see `Rows.tokens`."""
    if image_embeds is None or image_embeds.deepstack is None:
        return {}
    return {"deepstack_visual_embeds": list(image_embeds.deepstack)}


def _spread(row: Tensor, indices: Tensor, shape: tuple[int, int], padding: int) -> Tensor:
    """Spread packed values, [tokens, ...], over padded rows.

    Args:
        row: The values.
        indices: [tokens], int64: the index of each value in all rows, flattened.
        shape: Number of rows, and values of each.
        padding: Value of the places that stay empty.
    """
    padded = row.new_full((shape[0] * shape[1], *row.shape[1:]), padding)
    return padded.index_copy_(0, indices, row).view(*shape, *row.shape[1:])


def token_embedding(model: PreTrainedModel) -> Any:
    """Return the token embedding module, whose table is `weight`."""
    try:
        return model.get_input_embeddings()
    except NotImplementedError:  # transformers before 5.6 does not find it in CLIP's text model
        return model.get_submodule("embeddings.token_embedding")


def _position_table(model: PreTrainedModel) -> tuple[int, int | None]:
    """Find the model's table of position vectors.

    RoBERTa and its relatives have the padding token's id as `padding_idx` of the table, and count from the next row.

    Returns:
        The first row that is used, and the number of rows from there on; (0, None) where there is no such table.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and name.rpartition(".")[2] in _POSITION_TABLES:
            first = 0 if module.padding_idx is None else module.padding_idx + 1
            return first, module.num_embeddings - first
    return 0, None
