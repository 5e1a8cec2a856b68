"""Special tokens that config.json names by ids outside the vocabulary: there are none such.

Folders of models without padding say `pad_token_id: -1`, and transformers takes that for a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from staged_pool.runtime.models.quiet_loading import LOADER_ERRORS
from staged_pool.stages.errors import ConfigError

_FIELDS: Final = ("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id", "mask_token_id")


def clear_unknown_ids(config: PreTrainedConfig, *, keeps_end: bool = False) -> Iterator[str]:
    """Set ids outside the vocabulary to None; of a list, keep those inside.

    Args:
        config: Of a model, or of its part that reads texts. Is changed.
        keeps_end: Whether the end of a text is left as it is: CLIP looks for it, and takes the first token instead.

    Yields:
        What was changed, such as `pad_token_id=-1`.
    """
    rows = getattr(config, "vocab_size", None)
    if not isinstance(rows, int):
        return
    for field in _FIELDS:
        given = getattr(config, field, None)
        if given is None or (keeps_end and field == "eos_token_id"):
            continue
        ids = given if isinstance(given, list | tuple) else [given]
        inside = [i for i in ids if isinstance(i, int) and 0 <= i < rows]
        if len(inside) < len(ids):
            kept: Any = inside if isinstance(given, list | tuple) and inside else None
            setattr(config, field, kept)
            yield f"{field}={given!r}"


def check_without_padding(model: PreTrainedModel, given: str) -> None:
    """Run a model whose padding token was cleared on two tokens.

    Args:
        model: The part that reads texts.
        given: What config.json says of the token.

    Raises:
        ConfigError: It does not run without one, as RoBERTa, which counts positions from that id.
    """
    try:
        with torch.inference_mode():
            model(input_ids=torch.tensor([[0, 1]], device=model.device))
    except LOADER_ERRORS as error:
        raise ConfigError(
            f"config.json: {given} is no token of the vocabulary, and {type(model).__name__} does not run without one: "
            "set it to the id of its padding token"
        ) from error
