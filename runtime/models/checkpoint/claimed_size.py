"""Check of the size of a config's model, before memory is taken for it."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from staged_pool.runtime.models.checkpoint.stored_size import stored_weights
from staged_pool.stages.errors import ConfigError

_TIMES_STORED: Final = 2
"""Values of a model for each one among its weights. An output layer as large as the token embedding may be missing."""

_FEW: Final = 2**20
"""Further values that may be missing, such as a pooler's, or are computed."""


def check_claimed_size(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, body: Path, settings: Mapping[str, Any]
) -> None:
    """Reject a config whose model is far larger than the weights.

    transformers takes memory for the whole model, and fills missing weights with random numbers. Here the model is made
    without memory.

    Args:
        model_class: Class of the model.
        config: Its config, which is not changed.
        body: Folder of the weights.
        settings: Further arguments of the class.

    Raises:
        ConfigError: Names the largest tensor, and the field that is among its dimensions.
    """
    with torch.device("meta"):
        model = model_class(copy.deepcopy(config), **settings)
    tensors: dict[str, Tensor] = dict([*model.named_parameters(), *model.named_buffers()])
    claimed, stored = sum(tensor.numel() for tensor in tensors.values()), stored_weights(body)
    if claimed <= _TIMES_STORED * stored + _FEW:
        return
    name, largest = max(tensors.items(), key=lambda item: item[1].numel())
    field = _field_of(config, largest)
    raise ConfigError(
        f"config.json: {field}asks for a model of {claimed:,} values, such as {name} of {[*largest.shape]}, "
        f"but the weights have {stored:,}"
    )


def _field_of(config: PreTrainedConfig, tensor: Tensor) -> str:
    """Return the field that is the largest dimension of a tensor, for a message; empty without one."""
    largest = max(tensor.shape, default=math.inf)
    for place, part in (("", config), ("text_config: ", config.get_text_config())):
        for field, value in vars(part).items():
            if value == largest and isinstance(value, int):
                return f"{place}{field}={value} "
    return ""
