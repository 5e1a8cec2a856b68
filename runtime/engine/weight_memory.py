"""Memory of the weights of models: of loaded ones, and of those that are to be loaded."""

from __future__ import annotations

from typing import Final

from staged_pool.runtime.card import ModelCard
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.device_names import device_names
from staged_pool.runtime.models.find import FoundModel

WEIGHT_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 4}
"""Bytes of a weight, by data type. With int8, weights are read in float32, and layers are rounded after that."""


def weights_bytes(card: ModelCard) -> int:
    """Return the bytes of the weights of a loaded model, on all its devices; 0 for a plugin."""
    return 0 if card.is_plugin else card.parameters * WEIGHT_BYTES[card.dtype] * (1 + card.device.count(","))


def expected_bytes(found: FoundModel, config: EngineConfig, auto: str) -> int:
    """Return the bytes that the weights of a model will take, by its files. Reads files: call it in a thread.

    Args:
        found: The model.
        config: Its settings.
        auto: Data type that the setting `auto` stands for.

    Raises:
        ConfigError: A file is missing or damaged.
    """
    from staged_pool.runtime.models.checkpoint.stored_size import stored_weights  # imports torch

    dtype = auto if config.dtype == "auto" else config.dtype
    return stored_weights(found.folder.body) * WEIGHT_BYTES[dtype] * len(device_names(config.device))
