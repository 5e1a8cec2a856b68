"""Choice of the data type of a model's weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from staged_pool.runtime.config import DType as DTypeName
from staged_pool.runtime.models.devices.accelerators import multiplies_bfloat16
from staged_pool.runtime.models.devices.kernel_choices import capabilities, tuning
from staged_pool.runtime.models.devices.processor import bfloat16_pays, bfloat16_usually_pays
from staged_pool.runtime.models.quantizing.int8 import why_no_int8
from staged_pool.stages.errors import ConfigError

_DTYPES: Final = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.float32,  # the checkpoint; its layers are rounded once their inputs are known
}


def choose_dtype(wanted: DTypeName, devices: Sequence[torch.device]) -> torch.dtype:
    """Return the data type of the weights.

    `auto` is bfloat16 if every GPU multiplies in it, or float16; on a CPU, bfloat16 if it is faster there, or float32.

    Raises:
        ConfigError: `wanted` does not run on the device.
    """
    on_cpu = devices[0].type == "cpu"
    if wanted != "auto":
        if wanted == "float16" and on_cpu:
            raise ConfigError("dtype='float16': is for GPUs; a CPU takes float32, bfloat16 or int8")
        if wanted == "int8":
            reason = why_no_int8(capabilities()) if on_cpu else "a GPU takes float32, bfloat16 or float16"
            if reason:
                raise ConfigError(f"dtype='int8': {reason}")
        return _DTYPES[wanted]
    if on_cpu:
        pays = tuning().choose(
            "bfloat16",
            table=bfloat16_usually_pays(),
            measure=bfloat16_pays,
            allowed=lambda kept: isinstance(kept, bool),
        )
        return torch.bfloat16 if pays else torch.float32
    return torch.bfloat16 if all(map(multiplies_bfloat16, devices)) else torch.float16
