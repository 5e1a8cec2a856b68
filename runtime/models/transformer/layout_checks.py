"""Checks at load of how a transformer may run: packed or padded, together or one sequence a forward.

A packed batch is right only where the architecture takes its attention function from transformers and passes every
argument through to it. Some classes claim that and do not. So each check runs both ways on test sequences and compares.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor, nn

from staged_pool.runtime.config import Attention
from staged_pool.runtime.models.kernels.misuse import MISUSE_ERRORS
from staged_pool.runtime.models.kernels.module_state import ModuleState
from staged_pool.runtime.models.kernels.self_check import TOLERANCE, difference
from staged_pool.runtime.models.transformer.image_embeds import ImageEmbeds
from staged_pool.runtime.models.transformer.packed_transformer import PackedTransformer
from staged_pool.runtime.models.transformer.packing import PackedBatch
from staged_pool.runtime.payloads import TokenSequence
from staged_pool.runtime.requests import DENSE_ONLY
from staged_pool.stages.errors import ConfigError

_LONGEST_TABLE: Final = 1024
"""Rows of the largest position table that is tested with a longer packed row. A larger one would take too long."""


def check_state(transformer: PackedTransformer, max_tokens: int) -> str | None:
    """Find out whether forwards change the model, and undo their changes before each one.

    Such a model runs one sequence a forward, and one forward at a time.

    Args:
        transformer: Before its first forward.
        max_tokens: Longest input of the model.

    Returns:
        What forwards change; None where they change nothing.

    Raises:
        ConfigError: Every forward changes the weights.
    """
    model = transformer.model
    state, transformer.loaded_state = transformer.loaded_state or ModuleState(model), None
    changed = _changed_by_forwards(transformer, state, max_tokens)
    if state.weights_changed():  # some models scale their weights at the first forward, and only then
        state = ModuleState(model)
        changed = _changed_by_forwards(transformer, state, max_tokens)
        if state.weights_changed():
            raise ConfigError(f"{type(model).__name__} changes its weights in every forward")
    if not changed:
        return None
    state.restore()
    transformer.start_state, transformer.run_rows = state, transformer.run_from_start_state
    return f"forwards change {', '.join(changed[:4])}: each text runs alone, from the state as loaded"


def check_positions(transformer: PackedTransformer) -> str | None:
    """Compare our position ids with those that the model counts itself.

    Where they differ, the model counts from then on, and cannot run packed.

    Returns:
        The reason, where they differ; None where they agree, or where the model takes no positions.
    """
    model, rows = transformer.model, transformer.rows
    if not rows.takes_positions:
        return None
    padding = getattr(model.config, "pad_token_id", None) or 0
    ids = [token for token in range(2, 12) if token != padding]  # a model that counts skips padding tokens
    batch = transformer.pack([TokenSequence(ids, DENSE_ONLY)])
    row = batch.ids[: batch.tokens].unsqueeze(0)
    with torch.inference_mode():
        counted: Tensor = model(input_ids=row, attention_mask=torch.ones_like(row))[0]
        apart = difference(transformer.run_rows(batch, None).float(), counted[0].float())
    if not apart > TOLERANCE[model.dtype]:  # NaN passes: the warm-up reports it
        return None
    rows.takes_positions = False
    return f"{type(model).__name__} counts positions in a way of its own"


def check_directions(transformer: PackedTransformer) -> None:
    """Check that a decoder with `is_causal: false` attends in both directions, in its current layout.

    Raises:
        ConfigError: A token's vector does not depend on a later token.
    """
    model = transformer.model
    if getattr(model.config, "is_causal", None) is not False or transformer.start_state is not None:
        return
    rows = []
    with torch.inference_mode():
        for last in (2, 3):
            batch = transformer.pack([TokenSequence([5, 4, last], DENSE_ONLY)])
            rows.append(transformer.hidden(batch)[0].float())
    if difference(rows[1], rows[0]) == 0:
        name = type(model).__name__
        raise ConfigError(
            f"config.json: is_causal=false, but {name} of this transformers attends to earlier tokens only"
        )


def check_batch_independence(transformer: PackedTransformer, max_tokens: int) -> str | None:
    """Find out whether a sequence's vectors depend on the other rows of its batch.

    They may depend on padding, which convolutions read although the mask hides it, or on the other sequences. Sequences
    then run with others of equal length, or alone.

    Args:
        transformer: In the `padded` layout.
        max_tokens: Longest input of the model.

    Returns:
        The reason, where they depend on it; None where they do not.

    Raises:
        ConfigError: The model gives other vectors each time.
    """
    if transformer.start_state is not None:
        return None
    model, rows = transformer.model, transformer.rows
    name, batch, tolerance = type(model).__name__, transformer.probe(max_tokens), TOLERANCE[model.dtype]
    reads_neighbours = why_reads_neighbours(model)
    with torch.inference_mode():
        alone = rows.one_by_one(batch).float()
        apart = difference(rows.padded(batch).float(), alone)
        if reads_neighbours is None and not apart > tolerance:  # NaN passes: the warm-up reports it
            return None
        again = difference(rows.one_by_one(batch).float(), alone)
        if not again <= tolerance:
            raise ConfigError(f"{name} gives other vectors each time (relative difference {again:.2g})")
        by_length = difference(rows.by_length(batch).float(), alone)
    if by_length <= tolerance:
        transformer.run_rows = rows.by_length
        if reads_neighbours is not None:
            return f"{name} {reads_neighbours}: texts run without padding"
        return f"{name} gives other vectors beside padding (relative difference {apart:.2g})"
    transformer.run_rows = rows.one_by_one
    return f"{name} gives other vectors beside other texts (relative difference {by_length:.2g})"


def why_reads_neighbours(model: nn.Module) -> str | None:
    """Tell how a layer other than attention reads the tokens beside each one.

    Padding, and a sequence behind another, are such tokens. How much they change depends on the weights, so a
    measured difference may be small and yet change vectors: such a model never runs beside padding, or packed.

    Args:
        model: The transformer.

    Returns:
        The reason; None where no such layer is known.
    """
    if any(isinstance(part, nn.Conv1d) and max(part.kernel_size) > 1 for part in model.modules()):
        return "has convolutions, which read the tokens beside each one"
    if getattr(getattr(model, "config", None), "trigram_input", False):
        return "embeds each token with those beside it"
    return None


def choose_layout(
    transformer: PackedTransformer,
    wanted: Attention,
    max_tokens: int,
    image_probe: tuple[PackedBatch, ImageEmbeds] | None = None,
) -> str | None:
    """Use packed batches where `wanted` allows them and they are right.

    Args:
        transformer: Set to the layout that is chosen.
        wanted: Setting of the user.
        max_tokens: Longest input of the model.
        image_probe: A batch with images, for a vision language model: packed must be right for it, too.

    Returns:
        Why batches are padded; None where they are packed, or where the user asked for padding.

    Raises:
        ConfigError: The user asked for `packed`, and it is not right for this model.
    """
    if wanted == "padded":
        return None
    reason = _why_not_packed(
        transformer, [(transformer.probe(max_tokens), None), *([image_probe] if image_probe else [])]
    )
    if reason is None:
        transformer.use_layout("packed")
    elif wanted == "packed":
        raise ConfigError(f"attention='packed': {reason}")
    return reason


def _why_not_packed(
    transformer: PackedTransformer, probes: Sequence[tuple[PackedBatch, ImageEmbeds | None]]
) -> str | None:
    model, rows = transformer.model, transformer.rows
    name = type(model).__name__
    if not model.is_backend_compatible():
        return f"{name} does not let its attention be replaced"
    if not rows.takes_positions:
        return f"{name} takes no positions"
    if (reason := why_reads_neighbours(model)) is not None:
        return f"{name} {reason}"
    if transformer.start_state is not None:
        return f"{name} runs one text at a time"
    try:
        with torch.inference_mode():
            alone = [rows.one_by_one(batch, embeds).float() for batch, embeds in probes]
            transformer.use_layout("packed")
            packed = [transformer.run_one_row(batch, embeds).float() for batch, embeds in probes]
            if (limit := transformer.position_limit) is not None and limit <= _LONGEST_TABLE:
                # Some models reject a row longer than their position table, even if no position in it is beyond.
                half = TokenSequence([0] * (limit // 2 + 1), DENSE_ONLY)
                transformer.run_one_row(transformer.pack([half, half]))
    except MISUSE_ERRORS as error:
        return f"{name} fails on a packed batch: {error}"
    finally:
        transformer.use_layout("padded")
    # Not max(), which may lose a NaN.
    apart = next((d for d in map(difference, packed, alone) if not d <= TOLERANCE[model.dtype]), 0.0)
    if not apart <= TOLERANCE[model.dtype]:
        return f"{name} gives other vectors on a packed batch (relative difference {apart:.2g})"
    return None


def _changed_by_forwards(transformer: PackedTransformer, state: ModuleState, max_tokens: int) -> list[str]:
    """Run short and long sequences, and name the attributes that then differ from `state`."""
    changed = dict[str, None]()
    with torch.inference_mode():
        for sequence in transformer.probes(max_tokens).sequences():
            transformer.rows.padded(transformer.pack([sequence]))
            changed |= dict.fromkeys(state.changes())
    return [*changed]
