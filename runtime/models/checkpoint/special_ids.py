"""Special tokens that config.json names by ids outside the vocabulary: there are none such.

Folders of models without padding say `pad_token_id: -1`, and transformers takes that for a token.
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
    """The fields that name ids outside the vocabulary, and what they are instead: None, or those of a list inside it.

    Args:
        config: What config.json says of a model, or of its part that reads texts.
        keeps_end: Whether the end of a text is left as it is: CLIP looks for it, and takes the first token instead.
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
    """Change the fields of `unknown_ids` in a config of transformers.

    Returns:
        What they were before.
    """
    found = unknown_ids(
        {field: getattr(config, field, None) for field in (*_FIELDS, "vocab_size")}, keeps_end=keeps_end
    )
    before = {}
    for field, value in found.items():
        given = getattr(config, field)
        try:
            setattr(config, field, value)
        except LOADER_ERRORS:  # a class that has no None there, as EuroBERT has none of its mask token
            continue
        before[field] = given
    return before


def with_note(folder: ModelFolder) -> ModelFolder:
    """The folder with a note for the log, where its config.json names ids outside the vocabulary."""
    found: dict[str, Any] = {}
    for part in (folder.config, folder.config.get("text_config")):
        if isinstance(part, Mapping):
            unknown = unknown_ids(part, keeps_end=folder.architecture == "two towers")
            found |= {field: part[field] for field in unknown}
    if not found:
        return folder
    said = ", ".join(f"{field}={value!r}" for field, value in found.items())
    note = f"config.json: {said}: not in the vocabulary, taken for none"
    return replace(folder, notes=(*folder.notes, note))


def check_without_padding(model: PreTrainedModel, given: int) -> None:
    """Run a model whose padding token was cleared on two tokens.

    Args:
        model: The part that reads texts.
        given: The id that config.json says.

    Raises:
        ConfigError: It does not run without one, as RoBERTa, which counts positions from that id.
    """
    try:
        with torch.inference_mode():
            model(input_ids=torch.tensor([[0, 1]], device=model.device))
    except LOADER_ERRORS as error:
        raise ConfigError(
            f"config.json: pad_token_id={given} is no token of the vocabulary, and {type(model).__name__} does not run "
            "without one: set it to the id of its padding token"
        ) from error
