"""Refuse a checkpoint that holds weights which nothing reads.

A weight that is left over belongs to a part of the model that is not run. Parts whose absence changes no result are
listed here by their role; any other part is named, and the folder is rejected.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Final

from transformers import PreTrainedModel

from staged_pool.runtime.models.specs.model import ModelFolder, MultiVectorSpec, Projection, TokenWeightsSpec
from staged_pool.stages.errors import ConfigError

_DIGITS: Final = re.compile(r"(?<=\.)\d+(?=\.)")
"""Numbers of layers in the name of a weight."""

_COMPUTED: Final = re.compile(
    r"(^|\.)(position_ids|token_type_ids|inv_freq|original_inv_freq|cos_cached|sin_cached|cos_sin_cache"
    r"|num_batches_tracked|_extra_state|masked_bias|attn\.bias|attention\.bias|h\.\d+\.attn\.bias)$"
)
"""Buffers that older versions of transformers saved, and that each model computes for itself."""

_POOLER: Final = re.compile(r"(^|\.)pooler\.")
"""The layer on BERT's first token that only heads read."""

_MASK: Final = re.compile(r"(^|\.)mask_token$")
"""The vector that stood in the place of hidden patches in training."""

_PRETRAINING: Final = re.compile(
    r"^(cls|lm_head|lm_loss|lm_predictions|mask_predictions|predictions|sop_classifier|pred_layer|embed_out"
    r"|discriminator_predictions|generator_predictions|generator_lm_head|vocab_transform|vocab_layer_norm"
    r"|vocab_projector|entity_predictions|splinter_qass|decoder|head\.(dense|norm))(\.|$)|^final_logits_bias$"
)
"""Heads of pretraining: what fills in or continues a text, and the decoder behind an encoder."""

_NEXT_SENTENCE: Final = re.compile(r"^cls\.seq_relationship\.")
"""A part of BERT's pretraining head that lies beside the one that fills in masked tokens."""

_LABELS: Final = re.compile(r"^(classifier|pre_classifier|score|sequence_summary|classification_head)\.")
"""Heads that give labels, which a folder with `modules.json` does not use."""


def check_leftovers(folder: ModelFolder, whole: PreTrainedModel, base: PreTrainedModel, left: Iterable[str]) -> None:
    """Reject a checkpoint with weights that nothing reads, unless they change no result.

    Args:
        folder: What was read of it.
        whole: The model that was made of the checkpoint.
        base: Its transformer; the same as `whole` for an encoder.
        left: Names of the weights in the checkpoint that `whole` has no place for.

    Raises:
        ConfigError: Names some of the weights.
    """
    names = [name for name in left if not any(known.search(name) for known in (_COMPUTED, _POOLER, _MASK))]
    names = sorted(set(names) - set(_read_by_heads(folder)))
    if more := _of_other_layers(whole, names):
        raise ConfigError(
            f"{folder.body}: the weights have layers that config.json does not speak of, such as {more[0]}"
        )
    parts = {name for name, _ in base.named_children()}
    inside = [name for name in names if _part(name, base) in parts]
    if inside:
        raise ConfigError(
            f"{folder.body}: {_some(inside)} of the weights would not be read by {type(whole).__name__}: its "
            "transformer differs from that of transformers, and gives other vectors"
        )
    used = {name for name, part in whole.named_children() if whole is not base and part is not base}
    unknown = [name for name in names if not _is_harmless(name, folder, used)]
    if unknown:
        raise ConfigError(
            f"{folder.body}: {_some(unknown)} of the weights would not be read by {type(whole).__name__}: they belong "
            "to a head that is not supported; --task embed (task='embed') reads the transformer alone, as an "
            "embedding model"
        )


def _is_harmless(name: str, folder: ModelFolder, used: Collection[str]) -> bool:
    """Say of a weight outside the transformer that no result depends on it; `used` are parts that results do."""
    if name.partition(".")[0] in used:
        return bool(_NEXT_SENTENCE.search(name))
    if folder.reading == "user" or _PRETRAINING.search(name):
        return True
    bare = folder.architecture in ("encoder", "image encoder")
    return bare and folder.reading == "folder" and bool(_LABELS.search(name))


def _read_by_heads(folder: ModelFolder) -> Iterable[str]:
    """Weights that heads take from the checkpoint's own file."""
    for spec in folder.heads:
        modules = spec.modules if isinstance(spec, MultiVectorSpec) else ()
        projections = [spec.projection] if isinstance(spec, TokenWeightsSpec) else modules
        for module in projections:
            if isinstance(module, Projection) and any(file.parent == folder.body for file in module.files):
                yield module.weight
                yield module.bias or ""


def _of_other_layers(model: PreTrainedModel, names: Iterable[str]) -> list[str]:
    """Weights that have a place in a layer of which the model has fewer."""
    layers = {_DIGITS.sub("#", name) for name in model.state_dict() if _DIGITS.search(name)}
    return [name for name in names if _DIGITS.sub("#", name) in layers]


def _part(name: str, base: PreTrainedModel) -> str:
    """The part of the transformer that a weight belongs to, by its name."""
    return name.removeprefix(f"{base.base_model_prefix}.").partition(".")[0]


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
