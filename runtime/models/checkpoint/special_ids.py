"""Special token ids of config.json that lie outside the vocabulary: each is cleared.

Folders of models without padding have `pad_token_id: -1`, which transformers takes for a token id.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from staged_pool.runtime.models.checkpoint.quiet_loading import LOADER_ERRORS
from staged_pool.runtime.models.specs.model import ModelFolder
from staged_pool.stages.errors import ConfigError

_FIELDS: Final = ("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id", "mask_token_id")


def unknown_ids(config: Mapping[str, Any], *, keeps_end: bool = False) -> Mapping[str, Any]:
    """Find the fields whose ids lie outside the vocabulary.

    Args:
        config: `config.json` of a model, or of its part that reads text.
        keeps_end: Leave `eos_token_id` as it is: CLIP searches for it, and pools the first token if it is not found.

    Returns:
        The corrected value of each such field: None, or the ids of a list that are inside the vocabulary.
    """
    rows = config.get("vocab_size")
    found: dict[str, Any] = {}
    for field in _FIELDS:
        given = config.get(field)
        if given is None or not isinstance(rows, int) or (keeps_end and field == "eos_token_id"):
            continue
        several = isinstance(given, list | tuple)
        ids = given if several else [given]
        inside = [i for i in ids if isinstance(i, int) and 0 <= i < rows]
        if len(inside) < len(ids):
            found[field] = inside if several and inside else None
    return found


def clear_unknown_ids(config: PreTrainedConfig, *, keeps_end: bool = False) -> Mapping[str, Any]:
    """Correct the fields of `unknown_ids` in a transformers config.

    Returns:
        Their values before the change.
    """
    found = unknown_ids(
        {field: getattr(config, field, None) for field in (*_FIELDS, "vocab_size")}, keeps_end=keeps_end
    )
    before = {}
    for field, value in found.items():
        given = getattr(config, field)
        try:
            setattr(config, field, value)
        except LOADER_ERRORS:  # the class does not accept None, such as EuroBERT for its mask token
            continue
        before[field] = given
    return before


def note_unknown_ids(folder: ModelFolder) -> ModelFolder:
    """Add a note for the log if config.json has ids outside the vocabulary."""
    found: dict[str, Any] = {}
    for part in (folder.config, folder.config.get("text_config")):
        if isinstance(part, Mapping):
            unknown = unknown_ids(part, keeps_end=folder.architecture == "two towers")
            found |= {field: part[field] for field in unknown}
    if not found:
        return folder
    fields = ", ".join(f"{field}={value!r}" for field, value in found.items())
    note = f"config.json: {fields}: not in the vocabulary, ignored"
    return replace(folder, notes=(*folder.notes, note))


def check_without_padding(model: PreTrainedModel, given: int) -> None:
    """Run a model on two tokens after its padding token was cleared.

    Args:
        model: The part that reads text.
        given: The `pad_token_id` of config.json.

    Raises:
        ConfigError: The model needs a padding token, such as RoBERTa, which counts positions from its id.
    """
    try:
        with torch.inference_mode():
            model(input_ids=torch.tensor([[0, 1]], device=model.device))
    except LOADER_ERRORS as error:
        raise ConfigError(
            f"config.json: pad_token_id={given} is not in the vocabulary, and {type(model).__name__} needs a padding "
            "token: set it to the id of that token"
        ) from error
