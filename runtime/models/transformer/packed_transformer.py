"""Run the transformer of a model on a packed batch, and give back packed token vectors.

Inside, the transformer sees either the packed row itself or rows padded to the longest input. Packed is right only
where the architecture takes its attention function from transformers and passes everything through to it; some
claim so and do not. So before packed is used, both layouts run on a probe and must agree.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Final, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from staged_pool.runtime.config import Attention
from staged_pool.runtime.model import TokenSequence
from staged_pool.runtime.models.kernels.attention import PACKED, attend_by, takes_varlen
from staged_pool.runtime.models.kernels.encoder_layers import Group
from staged_pool.runtime.models.kernels.linear import prepack_linears
from staged_pool.runtime.models.kernels.module_state import ModuleState
from staged_pool.runtime.models.kernels.packed_embeddings import use_packed_embeddings
from staged_pool.runtime.models.kernels.self_check import MISUSE_ERRORS, TOLERANCE, difference, keep_if_equal
from staged_pool.runtime.models.transformer.cuda_graphs import BUCKETS, Bucket, Graphs, Recorder
from staged_pool.runtime.models.transformer.fused import FusedLayers, fuse_layers, fusible_layers
from staged_pool.runtime.models.transformer.image_embeds import ImageEmbeds
from staged_pool.runtime.models.transformer.packing import PackedBatch
from staged_pool.runtime.models.transformer.probes import Probes
from staged_pool.runtime.models.transformer.rows import Rows, token_embedding
from staged_pool.runtime.requests import DENSE_ONLY
from staged_pool.stages.errors import ConfigError

Layout = Literal["packed", "padded"]

_LONGEST_TABLE: Final = 1024
"""Rows of a table of positions. Finding out what becomes of rows beyond a longer one would take too long."""


class PackedTransformer:
    """A transformer that takes packed batches.

    Args:
        model: A base model in eval mode whose first output is [batch, tokens, width].
    """

    model: PreTrainedModel

    layout: Layout
    """What the transformer sees; `padded` until `choose_layout` finds packed right."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.layout = "padded"
        self._restores = ExitStack()
        """Of what is changed for `packed`."""
        self._rows = Rows(model)
        self._run_rows = self._rows.padded
        """How batches run that are not packed."""
        self._loaded: ModuleState | None = ModuleState(model)
        """The state before any forward, until it has been compared."""
        self._state: ModuleState | None = None
        """The state that each forward begins in. None: forwards change nothing in it."""
        self._running = threading.Lock()
        """Held by a forward of a model that forwards change something in."""
        self._computed: Tensor | None = None
        """The token vectors of the probes, as they are computed now. None: not known."""
        self._in_one_call = False
        self._graphs: Graphs | None = None
        self._run_packed: Callable[..., Any] = model
        """What is given a packed batch: the model, or the parts of it that do all the work."""
        self._device = model.device  # which the model looks for among its parameters
        self._padded_attention: str = model.config._attn_implementation

    @property
    def position_limit(self) -> int | None:
        """Tokens that the table of position vectors has rows for. None: there is no such table."""
        return self._rows.position_limit

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
            raise ConfigError(f"{kind} has no vectors of its own for token ids, and is not supported") from error
        return rows

    @property
    def width(self) -> int:
        """Values of one token vector."""
        width: int = self.model.config.hidden_size
        return width

    @property
    def recorded(self) -> Sequence[Bucket]:
        """The sizes of batches that are replayed; see `record`."""
        return () if self._graphs is None else self._graphs.buckets

    def pack(self, sequences: Sequence[TokenSequence]) -> PackedBatch:
        """Begin to bring a batch to where the weights are."""
        return PackedBatch.of(sequences, self._device)

    def hidden(self, batch: PackedBatch, shown: ImageEmbeds | None = None) -> Tensor:
        """The last layer's token vectors: [tokens, width], in the dtype of the weights.

        Args:
            batch: The sequences.
            shown: What images put in the places of some of their tokens.
        """
        if self.layout == "packed":
            return self._packed(batch, shown)
        return self._run_rows(batch, shown)

    def check_state(self, max_tokens: int) -> str | None:
        """Find out whether forwards change something in the model. What they change is then brought back before each.

        Such a model runs one sequence a forward, and one forward at a time.

        Args:
            max_tokens: Longest input of the model.

        Returns:
            What they change; None where they change nothing.

        Raises:
            ConfigError: They change the weights.
        """
        state, self._loaded = self._loaded or ModuleState(self.model), None
        changed = self._changed_by_forwards(state, max_tokens)
        if state.weights_changed():  # some scale them at the first forward, once and for all
            state = ModuleState(self.model)
            changed = self._changed_by_forwards(state, max_tokens)
            if state.weights_changed():
                raise ConfigError(f"{type(self.model).__name__} changes its weights in every forward")
        if not changed:
            return None
        state.restore()
        self._state, self._run_rows = state, self._from_fresh
        return f"forwards change {', '.join(changed[:4])}: each text has one to itself, from the state as loaded"

    def choose_layout(
        self, wanted: Attention, max_tokens: int, probe: tuple[PackedBatch, ImageEmbeds] | None = None
    ) -> str | None:
        """Use packed batches where `wanted` allows them and they are right.

        Args:
            wanted: What the user allows.
            max_tokens: Longest input of the model.
            probe: For a model that is shown images, a batch with some: packed must be right for that, too.

        Returns:
            Why batches are padded; None where they are packed, or where padding was asked for.

        Raises:
            ConfigError: `packed` was asked for, and is not right for this model.
        """
        if wanted == "padded":
            return None
        reason = self._why_not_packed([(self._probe(max_tokens), None), *([probe] if probe else [])])
        if reason is None:
            self._use("packed")
        elif wanted == "packed":
            raise ConfigError(f"attention='packed': {reason}")
        return reason

    def check_positions(self) -> str | None:
        """Find out whether the positions that are given here are those that the model counts by itself. Where they are
        not, it is left to do that, and packed is not to be had.

        Returns:
            Why that is so; None where they are, or where the model takes none.
        """
        if not self._rows.takes_positions:
            return None
        padding = getattr(self.model.config, "pad_token_id", None) or 0
        ids = [token for token in range(2, 12) if token != padding]  # padding would not be counted
        batch = PackedBatch.of([TokenSequence(ids, DENSE_ONLY)], self._device)
        row = batch.ids[: batch.tokens].unsqueeze(0)
        with torch.inference_mode():
            counted: Tensor = self.model(input_ids=row, attention_mask=torch.ones_like(row))[0]
            apart = difference(self._run_rows(batch).float(), counted[0].float())
        if not apart > TOLERANCE[self.model.dtype]:  # NaN is for the warm-up to find
            return None
        self._rows.takes_positions = False
        return f"{type(self.model).__name__} counts positions in a way of its own"

    def check_company(self, max_tokens: int) -> str | None:
        """Find out whether token vectors depend on the other rows of a batch: on padding, which convolutions see
        although the mask hides it, or on the neighbours themselves. Sequences then run with those of their length, or
        by themselves.

        Returns:
            Why that is so; None where the rest of a batch does not matter.

        Raises:
            ConfigError: The model does not give the same vectors twice.
        """
        if self._state is not None:
            return None
        name, batch, most = type(self.model).__name__, self._probe(max_tokens), TOLERANCE[self.model.dtype]
        with torch.inference_mode():
            alone = self._rows.one_by_one(batch).float()
            apart = difference(self._rows.padded(batch).float(), alone)
            if not apart > most:  # NaN is for the warm-up to find
                return None
            again = difference(self._rows.one_by_one(batch).float(), alone)
            if not again <= most:
                raise ConfigError(f"{name} gives other vectors each time (relative difference {again:.2g})")
            by_length = difference(self._rows.each_length(batch).float(), alone)
        if by_length <= most:
            self._run_rows = self._rows.each_length
            return f"{name} gives other vectors beside padding (relative difference {apart:.2g})"
        self._run_rows = self._rows.one_by_one
        return f"{name} gives other vectors beside other texts (relative difference {by_length:.2g})"

    def fuse(self, max_tokens: int) -> str | None:
        """Run layers of a known structure in few calls, where that is right.

        Returns:
            Why it was not done; None where it was, or where there are no such layers.
        """
        places = [] if self._state is not None else fusible_layers(self.model)
        return self._change(partial(fuse_layers, places), max_tokens) if places else None

    def prepack(self, max_tokens: int) -> str | None:
        """Lay the weights of linear layers out for the processor, where that is right.

        Returns:
            Why it was not done; None where it was.
        """
        if self._state is not None:
            return "forwards change the model"
        return self._change(partial(prepack_linears, self.model), max_tokens)

    def call_parts(self, max_tokens: int) -> str | None:
        """Call the embeddings and the fused layers by themselves, where that is right: what transformers has around
        them takes a fifth of a millisecond of the interpreter for each batch, and adds nothing.

        Returns:
            Why it is not done; None where it is, or where the model does not consist of the two.
        """
        embeddings = getattr(self.model, "embeddings", None)
        fused = [module for module in self.model.modules() if isinstance(module, FusedLayers)]
        if self.layout != "packed" or len(fused) != 1 or not isinstance(embeddings, nn.Module):
            return None
        layers = fused[0]

        def parts(*, packed_groups: Sequence[Group], **tokens: Tensor) -> tuple[Tensor]:
            return (layers(embeddings(**tokens), packed_groups=packed_groups),)

        def change() -> Callable[[], None]:
            self._run_packed = parts
            return partial(setattr, self, "_run_packed", self.model)

        return self._change(change, max_tokens)

    def attend_in_one_call(self, max_tokens: int) -> str | None:
        """Have the sequences of packed batches attend in one call of a kernel, where the device has it and it is right.

        Returns:
            Why it is not done; None where it is, or where there is no such kernel.
        """
        if self.layout != "packed" or not takes_varlen(self._device, self.model.dtype):
            return None

        def change() -> Callable[[], None]:
            self._in_one_call = True
            return partial(setattr, self, "_in_one_call", False)

        return self._change(change, max_tokens)

    def record(self, max_tokens: int, recorder: Recorder, buckets: Iterable[Bucket] = BUCKETS) -> str | None:
        """Record forwards of a few sizes and replay them from then on, where that is right.

        Args:
            max_tokens: Longest input of the model.
            recorder: See `Recorder`.
            buckets: The sizes, from small to large.

        Returns:
            Why it is not done for all of them: those before the first that fails are kept. None: it is done, or
            sequences do not attend in one call.
        """
        if not self._in_one_call:
            return None
        if self._rows.positions_by_length:
            return "positions depend on the lengths of the texts, which a recording does not see"
        graphs = Graphs(self._run, self._device, max_tokens, recorder, types=self._rows.takes_types)
        why = None
        for bucket in buckets:
            probes = [PackedBatch.of(one, self._device) for one in self._in_bucket(bucket, max_tokens)]
            name = f"{type(self.model).__name__}, recorded for {bucket.tokens} tokens,"
            self._graphs = None
            why = keep_if_equal(
                partial(self._recorded, graphs, bucket),
                # What a replay gives lies where the next one writes.
                lambda probes=probes: torch.cat([self.hidden(one).clone() for one in probes]),  # type: ignore[misc]
                name=name,
                dtype=self.model.dtype,
            )
            if why:  # a larger one will not fare better
                graphs.forget(bucket)
                break
        self._graphs = graphs if graphs.buckets else None
        return why

    def _recorded(self, graphs: Graphs, bucket: Bucket) -> Callable[[], None]:
        """Record one more size, and replay what is recorded."""
        graphs.record(bucket)
        self._graphs = graphs
        return partial(setattr, self, "_graphs", None)

    def _in_bucket(self, bucket: Bucket, max_tokens: int) -> Iterator[Sequence[TokenSequence]]:
        """Two batches that this is the smallest size for: a replay may show what the one before has left behind."""
        probes, random = self._probes(max_tokens), np.random.default_rng(0)
        length = min(max_tokens, bucket.tokens // 4)
        for share in (0.75, 0.625):
            count = int(bucket.tokens * share / length)
            yield probes.made_up([max(1, length - place % 3) for place in range(count)], random)

    def _change(self, change: Callable[[], Callable[[], None]], max_tokens: int) -> str | None:
        """As `keep_if_equal`. What was computed behind the last change is what stands before this one."""
        known, self._computed = self._computed, None
        computed = [] if known is None else [known]
        asked = 0

        def compute() -> Tensor:
            nonlocal asked
            asked += 1
            if asked > len(computed):
                computed.append(self.hidden(self._probe(max_tokens)))
            return computed[asked - 1]

        why = keep_if_equal(change, compute, name=type(self.model).__name__, dtype=self.model.dtype)
        if computed:
            self._computed = computed[-1] if why is None else computed[0]
        return why

    def _why_not_packed(self, probes: Sequence[tuple[PackedBatch, ImageEmbeds | None]]) -> str | None:
        name = type(self.model).__name__
        if not self.model.is_backend_compatible():
            return f"{name} does not let its attention be replaced"
        if not self._rows.takes_positions:
            return f"{name} takes no positions"
        if self._state is not None:
            return f"{name} runs one text at a time"
        try:
            with torch.inference_mode():
                alone = [self._rows.one_by_one(batch, shown).float() for batch, shown in probes]
                self._use("packed")
                packed = [self._packed(batch, shown).float() for batch, shown in probes]
                if (limit := self.position_limit) is not None and limit <= _LONGEST_TABLE:
                    # Some refuse a row that is longer than their table of positions, whatever its positions are.
                    half = TokenSequence([0] * (limit // 2 + 1), DENSE_ONLY)
                    self._packed(PackedBatch.of([half, half], self._device))
        except MISUSE_ERRORS as error:
            return f"{name} fails on a packed batch: {error}"
        finally:
            self._use("padded")
        # Not max(), which may lose a NaN.
        apart = next((d for d in map(difference, packed, alone) if not d <= TOLERANCE[self.model.dtype]), 0.0)
        if not apart <= TOLERANCE[self.model.dtype]:
            return f"{name} gives other vectors on a packed batch (relative difference {apart:.2g})"
        return None

    def _use(self, layout: Layout) -> None:
        self._restores.close()
        if layout == "packed":
            self._restores.callback(use_packed_embeddings(self.model))
        attend_by(self.model, PACKED if layout == "packed" else self._padded_attention)
        self.layout = layout

    def _packed(self, batch: PackedBatch, shown: ImageEmbeds | None = None) -> Tensor:
        if self._graphs is not None and shown is None and _sees_all(batch):
            recorded = self._graphs.hidden(batch)
            if recorded is not None:
                return recorded
        return self._run(batch, shown)

    def _run(self, batch: PackedBatch, shown: ImageEmbeds | None = None) -> Tensor:
        rest = len(batch.ids) - batch.tokens  # sequences of one token each, whose vectors nobody looks at
        groups = [*batch.groups, Group(rest, 1, 1)] if rest else batch.groups
        more: dict[str, Any] = {}
        if batch.types is not None and self._rows.takes_types:
            more["token_type_ids"] = batch.types.unsqueeze(0)
        if self._in_one_call and _sees_all(batch):
            more["packed_bounds"] = batch.bounds
        if shown is not None and shown.positions is not None:
            positions = F.pad(shown.positions, (0, rest)).unsqueeze(1)
        else:
            positions = (batch.positions + self._rows.first_position).unsqueeze(0)
        run = self._run_packed if shown is None else self.model
        with self._rows.told(groups, packed=True):
            hidden: Tensor = run(
                **{name: row.unsqueeze(0) for name, row in self._rows.tokens(batch.ids, shown).items()},
                position_ids=positions,
                packed_groups=groups,
                **more,
            )[0]
        return hidden[0, : batch.tokens]

    def _from_fresh(self, batch: PackedBatch, shown: ImageEmbeds | None = None) -> Tensor:
        """Each sequence in a forward of its own, from the state that the model was loaded in."""
        assert self._state is not None
        vectors, token = [], 0
        for sequence in batch.sequences:
            part = shown.between(token, token + len(sequence.ids)) if shown is not None else None
            token += len(sequence.ids)
            with self._running:
                self._state.restore()
                vectors.append(self._rows.padded(PackedBatch.of([sequence], self._device), part))
        return torch.cat(vectors)

    def _changed_by_forwards(self, state: ModuleState, max_tokens: int) -> list[str]:
        """What forwards of short and long sequences change in the model, one after the other."""
        changed = dict[str, None]()
        with torch.inference_mode():
            for sequence in self._probes(max_tokens).sequences():
                self._rows.padded(PackedBatch.of([sequence], self._device))
                changed |= dict.fromkeys(state.changes())
        return [*changed]

    def _probes(self, max_tokens: int) -> Probes:
        return Probes(self.model, pairs=self._rows.takes_types, max_tokens=max_tokens)

    def _probe(self, max_tokens: int) -> PackedBatch:
        return PackedBatch.of(self._probes(max_tokens).sequences(), self._device)


def _sees_all(batch: PackedBatch) -> bool:
    """Whether every token sees all of its sequence, but for what layers themselves hide."""
    return all(group.seen == group.tokens for group in batch.groups)
