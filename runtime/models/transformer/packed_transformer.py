"""A transformer that runs packed batches and returns packed token vectors.

Inside, the model gets either one packed row or rows padded to the longest sequence. `layout_checks` finds out which of
the two is right, and `Speedups` makes forwards faster; both set attributes of `PackedTransformer`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from staged_pool.runtime.models.kernels.attention import PACKED, attend_by
from staged_pool.runtime.models.kernels.encoder_layers import Group
from staged_pool.runtime.models.kernels.module_state import ModuleState
from staged_pool.runtime.models.kernels.packed_embeddings import use_packed_embeddings
from staged_pool.runtime.models.transformer.adapters import AdapterChanges, Adapters
from staged_pool.runtime.models.transformer.cuda_graphs import Bucket, Graphs
from staged_pool.runtime.models.transformer.image_embeds import ImageEmbeds
from staged_pool.runtime.models.transformer.packing import PackedBatch
from staged_pool.runtime.models.transformer.probes import Probes
from staged_pool.runtime.models.transformer.rows import Rows, deepstack, token_embedding
from staged_pool.runtime.payloads import TokenSequence
from staged_pool.stages.errors import ConfigError

Layout = Literal["packed", "padded"]


class PackedTransformer:
    """A transformer that runs packed batches.

    Args:
        model: A base model in eval mode whose first output is [batch, tokens, width].
    """

    model: PreTrainedModel

    layout: Layout
    """Layout that the model gets: `padded`, until `choose_layout` finds that `packed` is right."""

    rows: Rows
    """Forwards of the `padded` layout."""

    run_rows: Callable[[PackedBatch, ImageEmbeds | None], Tensor]
    """Forward of a batch in the `padded` layout: a method of `rows`, or `run_from_start_state`."""

    run_packed: Callable[..., Any]
    """Forward of a batch in the `packed` layout: the model, or only those parts of it that compute something."""

    width: int
    """Values of one token vector."""

    attends_in_one_call: bool
    """Compute attention of all sequences of a packed batch in one kernel call."""

    adapters: Adapters | None
    """Adapters of which a batch uses one. None: there are none."""

    graphs: Graphs | None
    """Recorded forwards. None: none are recorded."""

    loaded_state: ModuleState | None
    """State before the first forward. None: `check_state` has compared it."""

    start_state: ModuleState | None
    """State that every forward starts from. None: forwards change nothing in the model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.layout = "padded"
        self.rows = Rows(model)
        self.run_rows = self.rows.padded
        self.run_packed = model
        projection = getattr(model, "embedding_projection", None)  # of EmbeddingGemma 2, on each token
        self.width = model.config.hidden_size if projection is None else projection.out_features
        self.attends_in_one_call = False
        self.graphs = None
        self.adapters = None
        self.loaded_state = ModuleState(model)
        self.start_state = None
        self.device = model.device  # a copy: the model looks it up among its parameters each time
        self._padded_attention: str = model.config._attn_implementation
        self._restores = ExitStack()
        """Undoes what `use_layout` has changed for `packed`."""
        self._forward_lock = threading.Lock()
        """Held during a forward that starts from `start_state`."""

    @property
    def position_limit(self) -> int | None:
        """Longest sequence that the table of position vectors has rows for. None: there is no such table."""
        return self.rows.position_limit

    @property
    def vocabulary(self) -> int:
        """Rows of the token embedding.

        Raises:
            ConfigError: There is none, as in models that read characters or bytes.
        """
        try:
            rows: int = token_embedding(self.model).weight.shape[0]
        except (NotImplementedError, AttributeError) as error:
            kind = type(self.model).__name__
            raise ConfigError(f"{kind} has no token embedding of its own, and is not supported") from error
        return rows

    @property
    def recorded(self) -> Sequence[Bucket]:
        """Batch sizes that have a recorded forward; see `Speedups.record`."""
        return () if self.graphs is None else self.graphs.buckets

    def pack(self, sequences: Sequence[TokenSequence]) -> PackedBatch:
        """Start to copy a batch to the device of the weights."""
        return PackedBatch.of(sequences, self.device)

    def hidden(self, batch: PackedBatch, image_embeds: ImageEmbeds | None = None) -> Tensor:
        """Compute the last layer's token vectors: [tokens, width], in the dtype of the weights.

        Args:
            batch: The sequences.
            image_embeds: Vectors that replace those of image tokens. None: the batch has no images.
        """
        run = self.run_one_row if self.layout == "packed" else self.run_rows
        if self.adapters is None:
            return run(batch, image_embeds)
        [adapter] = {sequence.adapter for sequence in batch.sequences}  # their batch key sees to that
        with self.adapters.use(adapter):
            return run(batch, image_embeds)

    def use_adapters(self, changes: AdapterChanges) -> None:
        """Add adapters, before the first forward."""
        self.adapters = Adapters(self.model, changes)
        self.loaded_state = ModuleState(self.model)

    def use_layout(self, layout: Layout) -> None:
        """Switch the model to a layout."""
        self._restores.close()
        if layout == "packed":
            self._restores.callback(use_packed_embeddings(self.model))
        attend_by(self.model, PACKED if layout == "packed" else self._padded_attention)
        self.layout = layout

    def run_one_row(self, batch: PackedBatch, image_embeds: ImageEmbeds | None = None) -> Tensor:
        """Run a batch in the `packed` layout; replay a recorded forward if one fits."""
        plain = image_embeds is None and batch.sequences[0].adapter is None and _attends_to_all(batch)
        if self.graphs is not None and plain:
            recorded = self.graphs.hidden(batch)
            if recorded is not None:
                return recorded
        return self.compute_one_row(batch, image_embeds)

    def compute_one_row(self, batch: PackedBatch, image_embeds: ImageEmbeds | None = None) -> Tensor:
        """Run a batch in the `packed` layout, without recorded forwards."""
        rest = len(batch.ids) - batch.tokens  # filler behind the batch: sequences of one token, their vectors are cut
        groups = [*batch.groups, Group(rest, 1, 1)] if rest else batch.groups
        more: dict[str, Any] = {}
        if batch.types is not None and self.rows.takes_types:
            more["token_type_ids"] = batch.types.unsqueeze(0)
        if self.attends_in_one_call and _attends_to_all(batch):
            more["packed_bounds"] = batch.bounds
        if image_embeds is not None and image_embeds.positions is not None:
            positions = F.pad(image_embeds.positions, (0, rest)).unsqueeze(1)
        else:
            positions = (batch.positions + self.rows.first_position).unsqueeze(0)
        run = self.run_packed if image_embeds is None else self.model
        with self.rows.forward_of(groups, packed=True):
            hidden: Tensor = run(
                **{name: row.unsqueeze(0) for name, row in self.rows.tokens(batch.ids, image_embeds).items()},
                position_ids=positions,
                packed_groups=groups,
                **deepstack(image_embeds),
                **more,
            )[0]
        return hidden[0, : batch.tokens]

    def run_from_start_state(self, batch: PackedBatch, image_embeds: ImageEmbeds | None = None) -> Tensor:
        """Run each sequence in its own forward, from the state as loaded."""
        assert self.start_state is not None
        vectors, token = [], 0
        for sequence in batch.sequences:
            end = token + len(sequence.ids)
            part = image_embeds.between(token, end) if image_embeds is not None else None
            token = end
            with self._forward_lock:
                self.start_state.restore()
                vectors.append(self.rows.padded(self.pack([sequence]), part))
        return torch.cat(vectors)

    def probes(self, max_tokens: int) -> Probes:
        """Make test sequences for this model; `max_tokens` is its longest input."""
        return Probes(self.model, pairs=self.rows.takes_types, max_tokens=max_tokens)

    def probe(self, max_tokens: int) -> PackedBatch:
        """Make one batch of test sequences, always the same."""
        return self.pack(self.probes(max_tokens).sequences())


def _attends_to_all(batch: PackedBatch) -> bool:
    """Tell whether tokens may attend to all of their sequence; masks of the layers themselves aside."""
    return all(group.key_tokens == group.tokens for group in batch.groups)
