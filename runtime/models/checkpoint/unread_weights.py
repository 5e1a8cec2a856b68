"""Check that rejects a checkpoint with unread weights.

An unread weight belongs to a part of the model that is not run. Parts whose absence changes no result are listed here
by their role. Any other unread weight rejects the folder, by name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from typing import Final

from transformers import PreTrainedModel

from staged_pool.runtime.models.specs.layers import LayersScoreSpec, Projection, StepLabelsSpec
from staged_pool.runtime.models.specs.model import (
    DenseSpec,
    HeadModule,
    ModelFolder,
    MultiVectorSpec,
    PooledLabelsSpec,
    TokenWeightsSpec,
)
from staged_pool.stages.errors import ConfigError

_DIGITS: Final = re.compile(r"(?<=\.)\d+(?=\.)")
"""Layer numbers in the name of a weight."""

_COMPUTED_BUFFERS: Final = re.compile(
    r"(^|\.)(position_ids|token_type_ids|inv_freq|original_inv_freq|cos_cached|sin_cached|cos_sin_cache"
    r"|num_batches_tracked|relative_position_index|_extra_state|masked_bias|attn\.bias|attention\.bias|h\.\d+\.attn\.bias)$"
)
"""Buffers that older versions of transformers saved; the models compute them at load."""

_POOLER: Final = re.compile(r"(^|\.)pooler\.")
"""BERT's pooler, the layer on the first token; only heads read its output."""

_MASK_TOKEN: Final = re.compile(r"(^|\.)mask_token$")
"""The vector that replaces masked patches in training."""

_PRETRAINING_HEADS: Final = re.compile(
    r"^(cls|lm_head|lm_loss|lm_predictions|mask_predictions|predictions|sop_classifier|pred_layer|embed_out"
    r"|discriminator_predictions|generator_predictions|generator_lm_head|vocab_transform|vocab_layer_norm"
    r"|vocab_projector|entity_predictions|splinter_qass|decoder|head\.(dense|norm))(\.|$)|^final_logits_bias$"
)
"""Pretraining heads (masked and causal language modelling), and the decoder after an encoder."""

_NEXT_SENTENCE: Final = re.compile(r"^cls\.seq_relationship\.")
"""BERT's next sentence head, saved beside the masked language modelling head."""

_LABEL_HEADS: Final = re.compile(r"^(classifier|pre_classifier|score|sequence_summary|classification_head)\.")
"""Classification heads, which a folder with `modules.json` does not use."""


def check_unread_weights(
    folder: ModelFolder, whole: PreTrainedModel, base: PreTrainedModel, left: Iterable[str]
) -> None:
    """Reject a checkpoint with unread weights, unless their absence changes no result.

    Args:
        folder: The settings read from the folder.
        whole: The model loaded from the checkpoint.
        base: Its transformer; the same as `whole` for an encoder.
        left: Names of the weights in the checkpoint that are not weights of `whole`.

    Raises:
        ConfigError: Names some of the weights.
    """
    names = [
        name for name in left if not any(known.search(name) for known in (_COMPUTED_BUFFERS, _POOLER, _MASK_TOKEN))
    ]
    names = sorted(set(names) - set(_read_by_heads(folder)))
    if more := _in_extra_layers(whole, names):
        raise ConfigError(f"{folder.body}: the weights have more layers than config.json, such as {more[0]}")
    parts = {name for name, _ in base.named_children()}
    inside = [name for name in names if _part(name, base) in parts]
    if inside:
        raise ConfigError(
            f"{folder.body}: {_sample(inside)} of the weights would not be read by {type(whole).__name__}: its "
            "architecture differs from this class of transformers, so its vectors would be wrong"
        )
    used = {name for name, part in whole.named_children() if whole is not base and part is not base}
    unknown = [name for name in names if not _is_harmless(name, folder, used)]
    if unknown:
        raise ConfigError(
            f"{folder.body}: {_sample(unknown)} of the weights would not be read by {type(whole).__name__}: they "
            "belong to a head that is not supported; --task embed (task='embed') uses the transformer alone, as an "
            "embedding model"
        )


def _is_harmless(name: str, folder: ModelFolder, used: Collection[str]) -> bool:
    """True if no result depends on this weight, which is outside the transformer.

    Args:
        name: Name of the weight.
        folder: The settings read from the folder.
        used: Names of the model's parts that results depend on.
    """
    if name.partition(".")[0] in used:
        return bool(_NEXT_SENTENCE.search(name))
    if folder.decided_by == "user" or _PRETRAINING_HEADS.search(name):
        return True
    bare = folder.architecture in ("encoder", "image encoder")
    return bare and folder.decided_by == "folder" and bool(_LABEL_HEADS.search(name))


def _read_by_heads(folder: ModelFolder) -> Iterable[str]:
    """Names of the weights that heads read from the checkpoint's own file."""
    for spec in folder.heads:
        own = MultiVectorSpec | DenseSpec | PooledLabelsSpec
        modules: Sequence[HeadModule] = spec.modules if isinstance(spec, own) else ()
        modules = spec.layers if isinstance(spec, LayersScoreSpec | StepLabelsSpec) else modules
        projections = [spec.projection] if isinstance(spec, TokenWeightsSpec) else modules
        for module in projections:
            if isinstance(module, Projection) and any(file.parent == folder.body for file in module.files):
                yield module.weight
                yield module.bias or ""


def _in_extra_layers(model: PreTrainedModel, names: Iterable[str]) -> list[str]:
    """Weights of layers beyond the model's last one."""
    layers = {_DIGITS.sub("#", name) for name in model.state_dict() if _DIGITS.search(name)}
    return [name for name in names if _DIGITS.sub("#", name) in layers]


def _part(name: str, base: PreTrainedModel) -> str:
    """Name of the part of the transformer that a weight belongs to."""
    return name.removeprefix(f"{base.base_model_prefix}.").partition(".")[0]


def _sample(names: list[str]) -> str:
    first = ", ".join(names[:3])
    return first if len(names) <= 3 else f"{first} and {len(names) - 3} more"
